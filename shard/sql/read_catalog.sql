-- The whole catalog, from one snapshot: every slot in order, with the org that is pinned to it and those who owned it
-- before.
SELECT
    (SELECT c.epoch FROM windrow.catalog c) AS catalog_epoch, p.slot,
    (SELECT pin.org FROM windrow.pin WHERE pin.slot = p.slot) AS org, p.writes, p.reads, p.epoch,
    (SELECT array_agg(f.shard ORDER BY f.shard) FROM windrow.former_owner f WHERE f.slot = p.slot) AS former,
    (SELECT array_agg(f.left_at ORDER BY f.shard) FROM windrow.former_owner f WHERE f.slot = p.slot) AS left_at
FROM windrow.placement p
ORDER BY p.slot
