-- Cancels jobs that a claim found past their expires_at; the claim's lease was only taken to do so and is not an attempt.
WITH ended AS (
    DELETE FROM windrow.job j
    WHERE j.id = ANY (%(ids)s::uuid[]) AND j.lease = %(lease)s AND j.expires_at <= now()
        AND j.queue_id & 4294967295 = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    RETURNING j.*
)
INSERT INTO windrow.finished (
    id, queue_id, enqueued_at, run_at, expires_at, priority, attempt, max_attempts, kind, payload, attributes, retry,
    dedup_key, trace, history, state, reason, finished_at, retention
)
SELECT
    e.id, e.queue_id, e.enqueued_at, e.run_at, e.expires_at, e.priority, e.attempt - 1, e.max_attempts, e.kind, e.payload,
    e.attributes, e.retry, e.dedup_key, e.trace, e.history, 'cancelled', 'past its expires_at',
    greatest(now(), (SELECT timestamptz 'epoch' + c.last_value * interval '1 us' FROM windrow.clock c)),
    coalesce((SELECT q.kept FROM windrow.queue q WHERE q.queue_id = e.queue_id AND q.kept IS NOT NULL), 30)
FROM ended e
RETURNING id::text
