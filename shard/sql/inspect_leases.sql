-- What the retry policy needs to know of leased jobs, before it decides.
SELECT
    j.id::text AS id, j.lease, j.attempt,
    coalesce(j.max_attempts, (SELECT q.max_attempts FROM windrow.queue q WHERE q.queue_id = j.queue_id)) AS max_attempts,
    coalesce(j.retry, (SELECT q.retry FROM windrow.queue q WHERE q.queue_id = j.queue_id))::text AS retry
FROM unnest(%(ids)s::uuid[], %(leases)s::bigint[]) AS m (id, lease)
-- By id alone: see extend.sql.
JOIN windrow.job j ON j.id = ANY (ARRAY[m.id])
    AND (j.lease = m.lease AND j.visible_at > now()
        AND j.queue_id & 4294967295 = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)) IS TRUE
