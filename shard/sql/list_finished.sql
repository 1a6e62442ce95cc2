-- One page of a queue's succeeded or cancelled jobs, newest id first.
SELECT
    f.id::text, q.queue, f.kind, f.state, CASE WHEN %(include_payload)s THEN f.payload END, f.attributes::text,
    f.priority, f.enqueued_at, f.run_at, f.expires_at, f.attempt, coalesce(f.max_attempts, q.max_attempts),
    coalesce(f.retry, q.retry)::text, f.dedup_key, NULL::timestamptz, f.worker, f.leased_at, f.finished_at,
    CASE WHEN %(include_payload)s THEN f.result END, f.reason, f.history::text
FROM windrow.queue q
JOIN windrow.finished f ON f.queue_id = q.queue_id
WHERE q.org = %(org)s AND q.queue = %(queue)s AND (%(kind)s = '' OR f.kind = %(kind)s) AND f.state = %(state)s
    AND f.id < %(before_id)s::uuid
ORDER BY f.id DESC
LIMIT %(rows)s
