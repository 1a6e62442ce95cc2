-- The ids of those of these queues that exist.
SELECT q.org, q.queue, q.queue_id
FROM unnest(%(orgs)s::text[], %(queues)s::text[]) AS n (org, queue)
-- OFFSET 0 fence: by its name alone, never by a walk through all queues.
CROSS JOIN LATERAL (
    SELECT q.org, q.queue, q.queue_id FROM windrow.queue q WHERE q.org = n.org AND q.queue = n.queue OFFSET 0
) q
