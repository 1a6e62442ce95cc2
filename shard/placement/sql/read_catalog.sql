-- What has changed in the catalog since an epoch, from one snapshot: the slots in order, each with the org that is
-- pinned to it and its former owners. If nothing has changed, one row without a slot. The first row has the confirmed
-- mark of each shard.
SELECT
    c.epoch AS catalog_epoch, p.slot, (SELECT pin.org FROM windrow.pin WHERE pin.slot = p.slot) AS org, p.writes, p.reads,
    p.epoch,
    (SELECT array_agg(f.shard ORDER BY f.shard) FROM windrow.former_owner f WHERE f.slot = p.slot) AS former,
    (SELECT array_agg(f.left_at ORDER BY f.shard) FROM windrow.former_owner f WHERE f.slot = p.slot) AS left_at,
    CASE WHEN row_number() OVER (ORDER BY p.slot) = 1 THEN (
        SELECT jsonb_object_agg(s.shard, jsonb_build_array(s.mark, s.mark_token)) FROM windrow.shard s WHERE s.mark IS NOT NULL
    ) END AS marks
FROM windrow.catalog c
LEFT JOIN windrow.placement p ON p.changed > %(since)s
ORDER BY p.slot
