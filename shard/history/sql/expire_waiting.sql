-- Cancels up to `rows` jobs whose `expires_at` has passed and which have no valid lease. Claims cancel the expired jobs
-- that they reach; this statement cancels the expired jobs that no claim reaches.
WITH ended AS (
    DELETE FROM windrow.job j
    WHERE j.ctid = ANY (ARRAY(
        SELECT late.ctid
        FROM windrow.job late
        WHERE late.expires_at <= now() AND (late.lease IS NULL OR late.visible_at <= now())
        ORDER BY late.expires_at
        LIMIT %(rows)s
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING j.*
), moved AS (
    INSERT INTO windrow.finished (
        id, queue_id, enqueued_at, run_at, expires_at, priority, attempt, max_attempts,
        {{kept_content}}, history, state, reason, finished_at, retention
    )
    SELECT
        e.id, e.queue_id, e.enqueued_at, {{cancelled_run_at(e)}}, e.expires_at, e.priority, e.attempt, e.max_attempts,
        {{kept_content(e)}}, {{history_with_lost(e)}}, 'cancelled', {{expiry_reason(e)}},
        {{finish_time}}, {{retention_of(e)}}
    FROM ended e
    RETURNING 1
)
SELECT count(*) FROM moved
