-- Tells routers which queues got jobs from another shard, because these jobs may be older than any job that was here:
-- see notify_work.sql. A notification holds less than 8,000 bytes, so a long list of queues is sent in parts.
SELECT pg_notify('windrow_work', 'balancer +' || string_agg(q.queue_id::text, ','))
FROM (
    SELECT q.queue_id, (row_number() OVER () - 1) / 390 AS part
    FROM unnest(%(orgs)s::text[], %(queues)s::text[]) AS n (org, queue)
    JOIN windrow.queue q ON q.org = n.org AND q.queue = n.queue
) q
GROUP BY q.part
