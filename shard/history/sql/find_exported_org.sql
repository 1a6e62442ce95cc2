-- Returns a row if jobs of this org are on their way to another shard.
SELECT
FROM windrow.queue q
JOIN windrow.departing d ON d.queue_id = q.queue_id
WHERE q.org = %(org)s
LIMIT 1
