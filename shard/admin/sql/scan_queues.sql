-- Returns the queues of this shard that come after the given org and queue, with their configurations, ordered by org
-- and queue.
SELECT q.org, q.queue, {{queue_settings(q)}}
FROM windrow.queue q
WHERE (q.org, q.queue) > (%(org)s, %(queue)s) AND q.slot >= 0
ORDER BY q.org, q.queue
LIMIT %(rows)s
