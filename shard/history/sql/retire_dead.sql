-- Cancels up to `rows` jobs that have been dead for `days` days.
WITH ended AS (
    DELETE FROM windrow.dead d
    WHERE d.ctid = ANY (ARRAY(
        SELECT old.ctid FROM windrow.dead old WHERE old.finished_at <= now() - %(days)s * interval '1 day'
        LIMIT %(rows)s
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING d.*
), moved AS (
    INSERT INTO windrow.finished ({{job_columns}}, state, reason, finished_at, retention)
    SELECT
        {{job_columns(e)}}, 'cancelled', 'dead for ' || %(days)s || ' days: ' || e.reason, {{finish_time}}, {{retention_of(e)}}
    FROM ended e
    RETURNING 1
)
SELECT count(*) FROM moved
