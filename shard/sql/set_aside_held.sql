-- Sets aside what a cold day has of orgs that are under legal hold, in the books too: as retention -1. Its ids stay known
-- there. The orgs are read once: one that is put under hold meanwhile is seen to by whoever drops the day.
WITH held AS MATERIALIZED (
    SELECT a.org_id, a.jobs
    FROM windrow.archived a
    JOIN windrow.org o ON o.org_id = a.org_id
    WHERE a.retention = %(retention)s AND a.day = %(day)s::date AND o.held
), moved AS (
    UPDATE windrow.cold c SET retention = -1
    FROM held
    WHERE c.queue_id & 4294967295 = held.org_id
        AND c.retention = %(retention)s
        AND c.finished_at >= %(day)s::date::timestamp AT TIME ZONE 'UTC'
        AND c.finished_at < %(past)s::date::timestamp AT TIME ZONE 'UTC'
), struck AS (
    DELETE FROM windrow.archived a USING held WHERE a.retention = %(retention)s AND a.day = %(day)s::date AND a.org_id = held.org_id
)
INSERT INTO windrow.archived AS a (retention, day, org_id, jobs)
SELECT -1, %(day)s::date, held.org_id, held.jobs FROM held
ON CONFLICT (retention, day, org_id) DO UPDATE SET jobs = a.jobs + excluded.jobs
