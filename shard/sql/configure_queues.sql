-- Gives queues of these slots the configuration that they have on another shard.
UPDATE windrow.queue AS q
SET
    paused = n.paused, retry = n.retry::jsonb, max_attempts = n.max_attempts, retention = n.retention, listed = n.listed,
    created_at = c.created_at
FROM unnest(
    %(orgs)s::text[], %(queues)s::text[], %(paused)s::boolean[], %(retries)s::text[], %(max_attempts)s::smallint[],
    %(retentions)s::smallint[], %(listed)s::boolean[], %(created_at_us)s::bigint[], %(of_slots)s::smallint[]
) AS n (org, queue, paused, retry, max_attempts, retention, listed, created_at_us, slot)
CROSS JOIN LATERAL (SELECT timestamptz 'epoch' + n.created_at_us * interval '1 us' AS created_at) c
-- An org that has got a slot of its own may be remembered elsewhere by its hash.
WHERE q.org = n.org AND q.queue = n.queue AND q.slot = n.slot
    AND (q.paused, q.retry, q.max_attempts, q.retention, q.listed, q.created_at)
        IS DISTINCT FROM (n.paused, n.retry::jsonb, n.max_attempts, n.retention, n.listed, c.created_at)
