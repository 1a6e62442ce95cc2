-- Returns the columns of leased jobs from which it is decided whether and when the jobs run again.
SELECT
    j.id::text AS id, j.lease, j.attempt,
    coalesce(j.max_attempts, (SELECT q.max_attempts FROM windrow.queue q WHERE q.queue_id = j.queue_id)) AS max_attempts,
    coalesce(j.retry, (SELECT q.retry FROM windrow.queue q WHERE q.queue_id = j.queue_id))::text AS retry
FROM unnest(%(ids)s::uuid[], %(leases)s::bigint[], %(org_positions)s::smallint[]) AS m (id, lease, org_position)
-- Finds the job by its id and org: see extend.sql.
JOIN windrow.job j ON j.id = ANY (ARRAY[m.id]) AND {{org_of(j)}} = {{org_id_of(m)}}
    AND (j.lease = m.lease AND j.visible_at > now()) IS TRUE
