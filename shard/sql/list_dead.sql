-- One page of a queue's dead jobs, newest id first.
SELECT
    d.id::text, q.queue, d.kind, 'dead', CASE WHEN %(include_payload)s THEN d.payload END, d.attributes::text, d.priority,
    d.enqueued_at, d.run_at, d.expires_at, d.attempt, coalesce(d.max_attempts, q.max_attempts),
    coalesce(d.retry, q.retry)::text, d.dedup_key, NULL::timestamptz, d.worker, d.leased_at, d.finished_at, NULL::bytea,
    d.reason, d.history::text
FROM windrow.queue q
JOIN windrow.dead d ON d.queue_id = q.queue_id
WHERE q.org = %(org)s AND q.queue = %(queue)s AND (%(kind)s = '' OR d.kind = %(kind)s) AND d.id < %(before_id)s::uuid
ORDER BY d.id DESC
LIMIT %(rows)s
