-- What of the catalog has changed since an epoch, from one snapshot: the slots in order, each with the org that is pinned to it
-- and those who owned it before. One row without a slot: nothing. The first row has the confirmed mark of each shard.
SELECT
    c.epoch AS catalog_epoch, p.slot, (SELECT pin.org FROM windrow.pin WHERE pin.slot = p.slot) AS org, p.writes, p.reads,
    p.epoch,
    (SELECT array_agg(f.shard ORDER BY f.shard) FROM windrow.former_owner f WHERE f.slot = p.slot) AS former,
    (SELECT array_agg(f.left_at ORDER BY f.shard) FROM windrow.former_owner f WHERE f.slot = p.slot) AS left_at,
    CASE WHEN row_number() OVER (ORDER BY p.slot) = 1 THEN (
        -- A schema of an earlier release has no such columns.
        SELECT jsonb_object_agg(s.shard, jsonb_build_array(to_jsonb(s) -> 'mark', to_jsonb(s) -> 'mark_token'))
        FROM windrow.shard s
        WHERE to_jsonb(s) ->> 'mark' IS NOT NULL
    ) END AS marks
FROM windrow.catalog c
LEFT JOIN windrow.placement p ON p.changed > %(since)s
ORDER BY p.slot
