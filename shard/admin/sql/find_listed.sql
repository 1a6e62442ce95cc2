-- Reads what a list of an org's jobs needs: the shard's time, the beginning of the shard's oldest cold day, the org's
-- number and slot, and the numbers of the org's queues, or of the named queue. Returns no row if this shard does not
-- know the org.
WITH RECURSIVE first AS (
    -- The oldest day of each retention. Each step reads the first entry of the next retention in the index.
    (SELECT a.retention, a.day FROM windrow.archived a ORDER BY a.retention, a.day LIMIT 1)
    UNION ALL
    SELECT next.*
    FROM first
    CROSS JOIN LATERAL (
        SELECT a.retention, a.day
        FROM windrow.archived a
        WHERE a.retention > first.retention
        ORDER BY a.retention, a.day
        LIMIT 1
    ) next
)
SELECT
    now(),
    (SELECT min(first.day)::timestamp AT TIME ZONE 'UTC' FROM first),
    o.org_id, o.slot,
    ARRAY(SELECT q.queue_id FROM windrow.queue q WHERE q.org = o.org AND (%(queue)s = '' OR q.queue = %(queue)s))
FROM windrow.org o
WHERE o.org = %(org)s
