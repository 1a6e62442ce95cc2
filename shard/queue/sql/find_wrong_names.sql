-- A router remembers an id for each queue. Returns those of these ids that another queue has, or no queue.
SELECT l.queue_id
FROM unnest(%(queue_ids)s::bigint[], %(orgs)s::text[], %(queues)s::text[]) AS l (queue_id, org, queue)
WHERE (SELECT q.org = l.org AND q.queue = l.queue FROM windrow.queue q WHERE q.queue_id = l.queue_id) IS NOT TRUE
