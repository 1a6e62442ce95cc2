-- Returns the orgs and names of the queues with these ids. Leaves out ids without a queue.
SELECT n.queue_id, q.org, q.queue
FROM unnest(%(queue_ids)s::bigint[]) AS n (queue_id)
-- OFFSET 0 makes Postgres find the queue by its id, as in claim.sql.
CROSS JOIN LATERAL (SELECT q.org, q.queue FROM windrow.queue q WHERE q.queue_id = n.queue_id OFFSET 0) q
