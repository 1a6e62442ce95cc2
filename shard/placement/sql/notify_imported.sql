-- Notifies routers of the queues that got jobs from another shard, because these jobs may be older than all jobs of
-- this shard: see notify_work.sql. A notification must have less than 8,000 bytes, so a long list of queues is sent in
-- several notifications.
SELECT pg_notify('windrow_work', 'balancer +' || string_agg(q.queue_id::text, ','))
FROM (
    SELECT q.queue_id, (row_number() OVER () - 1) / 390 AS part
    FROM unnest(%(orgs)s::text[], %(queues)s::text[]) AS n (org, queue)
    JOIN windrow.queue q ON q.org = n.org AND q.queue = n.queue
) q
GROUP BY q.part
