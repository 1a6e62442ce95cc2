-- The quarantined kinds of this shard, by the numbers of their queues, behind one of them.
SELECT k.queue_id, q.org, q.queue, k.kind
FROM windrow.quarantine k
JOIN windrow.queue q ON q.queue_id = k.queue_id
WHERE (k.queue_id, k.kind) > (%(behind)s, %(kind)s) AND q.slot >= 0
ORDER BY k.queue_id, k.kind
LIMIT %(rows)s
