-- Returns one page of an org's queues, ordered by name.
SELECT q.queue, q.created_at, {{effective_settings(q)}}
FROM windrow.queue q
WHERE q.org = %(org)s AND q.queue > %(after)s
    AND (
        q.listed
        OR EXISTS (SELECT FROM windrow.job j WHERE j.queue_id = q.queue_id)
        OR EXISTS (SELECT FROM windrow.dead d WHERE d.queue_id = q.queue_id)
    )
ORDER BY q.queue
LIMIT %(rows)s
