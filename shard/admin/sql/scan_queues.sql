-- The queues of this shard with their configurations, by org and name, behind one of them.
SELECT q.org, q.queue, {{queue_settings(q)}}
FROM windrow.queue q
WHERE (q.org, q.queue) > (%(org)s, %(queue)s) AND q.slot >= 0
ORDER BY q.org, q.queue
LIMIT %(rows)s
