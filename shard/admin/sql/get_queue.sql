-- Returns one queue with its configuration.
SELECT q.queue, q.created_at, {{effective_settings(q)}}
FROM windrow.queue q
WHERE q.org = %(org)s AND q.queue = %(queue)s
    AND (
        q.listed
        OR EXISTS (SELECT FROM windrow.job j WHERE j.queue_id = q.queue_id)
        OR EXISTS (SELECT FROM windrow.dead d WHERE d.queue_id = q.queue_id)
    )
