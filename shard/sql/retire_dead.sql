-- Cancels jobs that have been dead for `days`, up to `rows`.
WITH ended AS (
    DELETE FROM windrow.dead d
    WHERE d.ctid = ANY (ARRAY(
        SELECT old.ctid FROM windrow.dead old WHERE old.finished_at <= now() - %(days)s * interval '1 day'
        LIMIT %(rows)s
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING d.*
), moved AS (
    INSERT INTO windrow.finished (
        id, queue_id, enqueued_at, run_at, lease, leased_at, expires_at, priority, attempt, max_attempts, kind, payload,
        attributes, retry, dedup_key, trace, worker, history, state, reason, finished_at, retention
    )
    SELECT
        e.id, e.queue_id, e.enqueued_at, e.run_at, e.lease, e.leased_at, e.expires_at, e.priority, e.attempt,
        e.max_attempts, e.kind, e.payload, e.attributes, e.retry, e.dedup_key, e.trace, e.worker, e.history, 'cancelled',
        'dead for ' || %(days)s || ' days: ' || e.reason,
        greatest(now(), (SELECT timestamptz 'epoch' + c.last_value * interval '1 us' FROM windrow.clock c)),
        coalesce((SELECT q.kept FROM windrow.queue q WHERE q.queue_id = e.queue_id AND q.kept IS NOT NULL), 30)
    FROM ended e
    RETURNING 1
)
SELECT count(*) FROM moved
