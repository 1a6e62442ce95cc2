-- What has changed in the catalog since an epoch, from one snapshot: the slots of each placement, those of them that orgs
-- are pinned to, and their former owners. Thousands of slots have equal placements. If nothing has changed, one row
-- without slots. The first row has the confirmed mark of each shard, how often API keys were revoked, and the versions of
-- the limits and of the weights: read by name from the row's JSON, because commands of this release also read the catalogs of releases
-- before, which lack them.
SELECT
    c.epoch AS catalog_epoch, g.slots, g.pinned, g.orgs, g.writes, g.reads, g.epoch, g.former, g.left_at,
    CASE WHEN row_number() OVER () = 1 THEN (
        SELECT jsonb_object_agg(s.shard, jsonb_build_array(s.mark, s.mark_token)) FROM windrow.shard s WHERE s.mark IS NOT NULL
    ) END AS marks,
    CASE WHEN row_number() OVER () = 1 THEN (to_jsonb(c) ->> 'revocations')::bigint END AS revocations,
    CASE WHEN row_number() OVER () = 1 THEN (to_jsonb(c) ->> 'limits_changed')::bigint END AS limits,
    CASE WHEN row_number() OVER () = 1 THEN (to_jsonb(c) ->> 'weights_changed')::bigint END AS weights
FROM windrow.catalog c
LEFT JOIN (
    SELECT
        array_agg(p.slot) AS slots,
        array_agg(p.slot) FILTER (WHERE pin.org IS NOT NULL) AS pinned,
        array_agg(pin.org) FILTER (WHERE pin.org IS NOT NULL) AS orgs,
        p.writes, p.reads, p.epoch, f.former, f.left_at
    FROM windrow.placement p
    LEFT JOIN windrow.pin ON pin.slot = p.slot
    LEFT JOIN (
        SELECT o.slot, array_agg(o.shard ORDER BY o.shard) AS former, array_agg(o.left_at ORDER BY o.shard) AS left_at
        FROM windrow.former_owner o
        WHERE o.slot IN (SELECT changed.slot FROM windrow.placement changed WHERE changed.changed > %(since)s)
        GROUP BY o.slot
    ) f ON f.slot = p.slot
    WHERE p.changed > %(since)s
    GROUP BY p.writes, p.reads, p.epoch, f.former, f.left_at
) g ON true
