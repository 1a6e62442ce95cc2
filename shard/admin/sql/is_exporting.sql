-- Returns whether jobs of a queue are on their way from this shard to another shard.
SELECT EXISTS (
    SELECT
    FROM windrow.queue q
    JOIN windrow.departing d ON d.slot = q.slot AND d.queue_id = q.queue_id
    WHERE q.org = %(org)s AND q.queue = %(queue)s
)
