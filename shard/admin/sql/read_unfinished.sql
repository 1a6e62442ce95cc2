-- Returns the ids of a queue's live and dead jobs that are greater than `behind`, in ascending order.
SELECT there.id::text
-- OFFSET 0 makes Postgres find the queue by its name, never by a scan of all queues.
FROM (SELECT q.queue_id FROM windrow.queue q WHERE q.org = %(org)s AND q.queue = %(queue)s OFFSET 0) q
CROSS JOIN LATERAL (
    SELECT j.id FROM windrow.job j WHERE j.queue_id = q.queue_id
    UNION ALL
    SELECT d.id FROM windrow.dead d WHERE d.queue_id = q.queue_id
) there
WHERE there.id > %(behind)s::uuid
ORDER BY there.id
LIMIT %(rows)s
