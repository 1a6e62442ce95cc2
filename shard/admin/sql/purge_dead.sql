-- Cancels up to `rows` of a queue's dead jobs.
WITH ended AS (
    DELETE FROM windrow.dead d
    WHERE d.ctid = ANY (ARRAY(
        SELECT aside.ctid
        FROM windrow.dead aside
        JOIN windrow.queue q ON q.queue_id = aside.queue_id
        WHERE q.org = %(org)s AND q.queue = %(queue)s
        LIMIT %(rows)s
        FOR UPDATE OF aside SKIP LOCKED
    ))
    RETURNING d.*
)
INSERT INTO windrow.finished ({{job_columns}}, state, reason, finished_at, retention)
SELECT
    {{job_columns(e)}}, 'cancelled', 'purged',
    {{finish_time}},
    {{retention_of(e)}}
FROM ended e
RETURNING id::text
