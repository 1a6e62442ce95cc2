-- What the retry policy needs to know of leased jobs, before it decides.
SELECT
    j.id::text AS id, j.lease, j.attempt,
    coalesce(j.max_attempts, (SELECT q.max_attempts FROM windrow.queue q WHERE q.queue_id = j.queue_id)) AS max_attempts,
    coalesce(j.retry, (SELECT q.retry FROM windrow.queue q WHERE q.queue_id = j.queue_id))::text AS retry
FROM unnest(%(ids)s::uuid[], %(leases)s::bigint[], %(turns)s::smallint[]) AS m (id, lease, turn)
-- By id alone: see extend.sql.
JOIN windrow.job j ON j.id = ANY (ARRAY[m.id])
    AND (j.lease = m.lease AND j.visible_at > now()
        AND j.queue_id & 4294967295 = (SELECT windrow.org_ids(%(orgs)s::text[]))[coalesce(m.turn, 1)]) IS TRUE
