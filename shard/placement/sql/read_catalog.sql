-- What has changed in the catalog since an epoch, from one snapshot: the slots of each placement, those of them that orgs
-- are pinned to, and their former owners. Thousands of slots have equal placements. If nothing has changed, one row
-- without slots. The first row has the confirmed mark of each shard.
SELECT
    c.epoch AS catalog_epoch, g.slots, g.pinned, g.orgs, g.writes, g.reads, g.epoch, g.former, g.left_at,
    CASE WHEN row_number() OVER () = 1 THEN (
        SELECT jsonb_object_agg(s.shard, jsonb_build_array(s.mark, s.mark_token)) FROM windrow.shard s WHERE s.mark IS NOT NULL
    ) END AS marks
FROM windrow.catalog c
LEFT JOIN (
    SELECT
        array_agg(slot) AS slots,
        array_agg(slot) FILTER (WHERE org IS NOT NULL) AS pinned,
        array_agg(org) FILTER (WHERE org IS NOT NULL) AS orgs,
        writes, reads, epoch, former, left_at
    FROM (
        SELECT
            p.slot, p.writes, p.reads, p.epoch, f.former, f.left_at,
            (SELECT pin.org FROM windrow.pin WHERE pin.slot = p.slot) AS org
        FROM windrow.placement p
        LEFT JOIN LATERAL (
            SELECT array_agg(o.shard ORDER BY o.shard) AS former, array_agg(o.left_at ORDER BY o.shard) AS left_at
            FROM windrow.former_owner o WHERE o.slot = p.slot
        ) f ON true
        WHERE p.changed > %(since)s
    ) changed
    GROUP BY writes, reads, epoch, former, left_at
) g ON true
