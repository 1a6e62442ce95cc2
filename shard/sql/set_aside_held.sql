-- Sets aside what a cold day has of orgs that are under legal hold, in the books too: as retention -1. Its ids stay known
-- there. The orgs are read once: one that is put under hold meanwhile is seen to by whoever drops the day.
WITH held AS MATERIALIZED (
    SELECT a.org_id
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
    RETURNING held.org_id
), counted AS MATERIALIZED (
    -- What has joined the day since the books were read is left to the next look.
    SELECT moved.org_id, count(*) AS jobs FROM moved GROUP BY 1
), struck AS (
    UPDATE windrow.archived a SET jobs = a.jobs - counted.jobs
    FROM counted
    WHERE a.retention = %(retention)s AND a.day = %(day)s::date AND a.org_id = counted.org_id
)
INSERT INTO windrow.archived AS a (retention, day, org_id, jobs)
SELECT -1, %(day)s::date, counted.org_id, counted.jobs FROM counted
ON CONFLICT (retention, day, org_id) DO UPDATE SET jobs = a.jobs + excluded.jobs
