-- What the retry policy needs to know of leased jobs, before it decides.
SELECT
    j.id::text AS id, j.lease, j.attempt, coalesce(j.max_attempts, q.max_attempts) AS max_attempts,
    coalesce(j.retry, q.retry)::text AS retry
FROM unnest(%(ids)s::uuid[], %(leases)s::bigint[]) AS m (id, lease)
JOIN windrow.job j ON j.id = m.id AND j.lease = m.lease AND j.visible_at > now() AND j.queue_id & 4294967295 = %(org_id)s
JOIN windrow.queue q ON q.queue_id = j.queue_id
