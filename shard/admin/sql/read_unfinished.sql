-- Ids of live and dead jobs of a queue, in their order, behind one of them.
SELECT there.id::text
-- OFFSET 0 fence: by its name alone, never by a walk through all queues.
FROM (SELECT q.queue_id FROM windrow.queue q WHERE q.org = %(org)s AND q.queue = %(queue)s OFFSET 0) q
CROSS JOIN LATERAL (
    SELECT j.id FROM windrow.job j WHERE j.queue_id = q.queue_id
    UNION ALL
    SELECT d.id FROM windrow.dead d WHERE d.queue_id = q.queue_id
) there
WHERE there.id > %(behind)s::uuid
ORDER BY there.id
LIMIT %(rows)s
