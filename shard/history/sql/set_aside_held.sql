-- Gives the retention -1 to the jobs of a cold day whose orgs are under legal hold, in the table and in the books. So
-- Postgres moves these jobs to the partition of held jobs, where their ids stay known. The statement reads the list of
-- these orgs only once. If another org is put under hold meanwhile, the caller, which drops the day, handles that org.
WITH held AS MATERIALIZED (
    SELECT a.org_id
    FROM windrow.archived a
    JOIN windrow.org o ON o.org_id = a.org_id
    WHERE a.retention = %(retention)s AND a.day = %(day)s::date AND o.held
), moved AS (
    UPDATE windrow.cold c SET retention = -1
    FROM held
    WHERE {{org_of(c)}} = held.org_id
        AND c.retention = %(retention)s
        AND c.finished_at >= %(day)s::date::timestamp AT TIME ZONE 'UTC'
        AND c.finished_at < %(past)s::date::timestamp AT TIME ZONE 'UTC'
    RETURNING held.org_id
), counted AS MATERIALIZED (
    -- If jobs were added to this day after its books had been read, the next try handles them.
    SELECT moved.org_id, count(*) AS jobs FROM moved GROUP BY 1
), struck AS (
    UPDATE windrow.archived a SET jobs = a.jobs - counted.jobs
    FROM counted
    WHERE a.retention = %(retention)s AND a.day = %(day)s::date AND a.org_id = counted.org_id
)
INSERT INTO windrow.archived AS a (retention, day, org_id, jobs)
SELECT -1, %(day)s::date, counted.org_id, counted.jobs FROM counted
ON CONFLICT (retention, day, org_id) DO UPDATE SET jobs = a.jobs + excluded.jobs
