-- Returns what has changed in the catalog since the epoch `since`, read from one snapshot. Thousands of slots have
-- equal placements. So each row has one placement with its former owners, all slots that have this placement, and
-- separately those of these slots that belong to pinned orgs. If nothing has changed, returns one row without slots.
-- The first row also has the confirmed mark of each shard, the number of revocations of API keys, and the versions of
-- the limits and of the weights. The number of revocations and these versions are read by name from the row's JSON,
-- because commands of this release also read the catalogs of earlier releases, which lack these columns.
--
-- In a cluster without pins and former owners, only the first half of `g` (before UNION ALL) returns rows, and the
-- statement takes less than half the time. Otherwise `changed` combines the three tables by UNION ALL and GROUP BY, and
-- not by joins. The reason: after thousands of slots have moved, the statistics still say that few rows have changed.
-- For joins, the planner would then choose nested loops that take 10 s and more. IS TRUE prevents the planner from
-- turning IN into a join, so that Postgres looks up the slot in a hash table.
WITH other AS MATERIALIZED (
    -- Whether `pin` or `former_owner` has rows. NULL: nothing has changed, so these tables are not read.
    SELECT CASE WHEN c.epoch > %(since)s THEN
        EXISTS (SELECT FROM windrow.pin) OR EXISTS (SELECT FROM windrow.former_owner)
    END AS have_rows
    FROM windrow.catalog c
), moved AS MATERIALIZED (
    SELECT p.slot, p.writes, p.reads, p.epoch
    FROM windrow.placement p
    WHERE p.changed > %(since)s AND (SELECT o.have_rows FROM other o)
), changed AS (
    SELECT
        n.slot, max(n.writes) AS writes, max(n.reads) AS reads, max(n.epoch) AS epoch, max(n.org) AS org,
        array_agg(n.former ORDER BY n.former) FILTER (WHERE n.former IS NOT NULL) AS former,
        array_agg(n.left_at ORDER BY n.former) FILTER (WHERE n.former IS NOT NULL) AS left_at
    FROM (
        SELECT m.slot, m.writes, m.reads, m.epoch, NULL::text AS org, NULL::text AS former, NULL::timestamptz AS left_at
        FROM moved m
        UNION ALL
        SELECT pin.slot, NULL, NULL, NULL, pin.org, NULL, NULL
        FROM windrow.pin
        WHERE EXISTS (SELECT FROM moved) AND (pin.slot IN (SELECT m.slot FROM moved m)) IS TRUE
        UNION ALL
        SELECT o.slot, NULL, NULL, NULL, NULL, o.shard, o.left_at
        FROM windrow.former_owner o
        WHERE EXISTS (SELECT FROM moved) AND (o.slot IN (SELECT m.slot FROM moved m)) IS TRUE
    ) n
    GROUP BY n.slot
)
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
        array_agg(p.slot) AS slots, NULL::smallint[] AS pinned, NULL::text[] AS orgs,
        p.writes, p.reads, p.epoch, NULL::text[] AS former, NULL::timestamptz[] AS left_at
    FROM windrow.placement p
    WHERE p.changed > %(since)s AND NOT (SELECT o.have_rows FROM other o)
    GROUP BY p.writes, p.reads, p.epoch
    UNION ALL
    SELECT
        array_agg(n.slot),
        array_agg(n.slot) FILTER (WHERE n.org IS NOT NULL),
        array_agg(n.org) FILTER (WHERE n.org IS NOT NULL),
        n.writes, n.reads, n.epoch, n.former, n.left_at
    FROM changed n
    GROUP BY n.writes, n.reads, n.epoch, n.former, n.left_at
) g ON true
