-- Cancels up to `rows` of a queue's jobs that nobody holds.
WITH ended AS (
    DELETE FROM windrow.job j
    WHERE j.ctid = ANY (ARRAY(
        SELECT waiting.ctid
        FROM windrow.job waiting
        JOIN windrow.queue q ON q.queue_id = waiting.queue_id
        WHERE q.org = %(org)s AND q.queue = %(queue)s AND (waiting.lease IS NULL OR waiting.visible_at <= now())
        LIMIT %(rows)s
        FOR UPDATE OF waiting SKIP LOCKED
    ))
    RETURNING j.*
)
INSERT INTO windrow.finished (
    id, queue_id, enqueued_at, run_at, lease, leased_at, expires_at, priority, attempt, max_attempts, kind, payload,
    attributes, retry, dedup_key, trace, worker, history, state, reason, finished_at, retention
)
SELECT
    e.id, e.queue_id, e.enqueued_at, e.run_at, e.lease, e.leased_at, e.expires_at, e.priority, e.attempt, e.max_attempts,
    e.kind, e.payload, e.attributes, e.retry, e.dedup_key, e.trace, e.worker, e.history, 'cancelled', 'purged',
    greatest(now(), (SELECT timestamptz 'epoch' + c.last_value * interval '1 us' FROM windrow.clock c)),
    coalesce((SELECT q.kept FROM windrow.queue q WHERE q.queue_id = e.queue_id AND q.kept IS NOT NULL), 30)
FROM ended e
RETURNING id::text
