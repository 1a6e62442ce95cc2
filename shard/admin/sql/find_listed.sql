-- What a list of an org's jobs needs: the shard's time, the beginning of its oldest cold day, the org's number and
-- slot, and the numbers of its queues, or of the named one. No row: this shard does not know the org.
SELECT
    now(),
    (
        SELECT min(first.day)::timestamp AT TIME ZONE 'UTC'
        FROM unnest(ARRAY[-1, 0, 1, 7, 30, 90, 365, 2557]::smallint[]) AS n (retention)
        -- Each minimum is read from the start of its part of the index.
        CROSS JOIN LATERAL (SELECT min(a.day) AS day FROM windrow.archived a WHERE a.retention = n.retention) first
    ),
    o.org_id, o.slot,
    ARRAY(SELECT q.queue_id FROM windrow.queue q WHERE q.org = o.org AND (%(queue)s = '' OR q.queue = %(queue)s))
FROM windrow.org o
WHERE o.org = %(org)s
