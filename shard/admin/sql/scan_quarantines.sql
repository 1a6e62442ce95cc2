-- Returns the quarantined kinds of this shard that come after the given queue number and kind, ordered by queue number
-- and kind.
SELECT k.queue_id, q.org, q.queue, k.kind
FROM windrow.quarantine k
JOIN windrow.queue q ON q.queue_id = k.queue_id
WHERE (k.queue_id, k.kind) > (%(behind)s, %(kind)s) AND q.slot >= 0
ORDER BY k.queue_id, k.kind
LIMIT %(rows)s
