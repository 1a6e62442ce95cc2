-- Returns whether a queue has live, dead or exported jobs on this shard.
SELECT
    EXISTS (SELECT FROM windrow.job j WHERE j.queue_id = q.queue_id)
    OR EXISTS (SELECT FROM windrow.dead d WHERE d.queue_id = q.queue_id)
    OR EXISTS (SELECT FROM windrow.departing d WHERE d.slot = q.slot AND d.queue_id = q.queue_id)
FROM windrow.queue q
WHERE q.org = %(org)s AND q.queue = %(queue)s
