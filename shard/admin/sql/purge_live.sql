-- Cancels up to `rows` of a queue's jobs that have no valid lease.
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
INSERT INTO windrow.finished ({{job_columns}}, state, reason, finished_at, retention)
SELECT
    {{cancelled_columns(e)}}, {{history_with_lost(e)}}, 'cancelled', 'purged',
    {{finish_time}},
    {{retention_of(e)}}
FROM ended e
RETURNING id::text
