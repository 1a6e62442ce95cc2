-- Returns the ids of the queues that exist.
SELECT q.org, q.queue, q.queue_id
FROM unnest(%(orgs)s::text[], %(queues)s::text[]) AS n (org, queue)
-- OFFSET 0 makes Postgres find the queue by its name, never by a scan of all queues.
CROSS JOIN LATERAL (
    SELECT q.org, q.queue, q.queue_id FROM windrow.queue q WHERE q.org = n.org AND q.queue = n.queue OFFSET 0
) q
