-- For one cold day and these queues of an org, changes the retention of the jobs, in the table and in the books of cold
-- days. Returns how many jobs had another retention. A job that is kept for a legal hold (retention -1) gets the
-- retention of its queue only if that retention is not over. If such a job kept the retention -1, it would be dropped
-- at the end of the hold, although its queue keeps it for longer.
WITH moved AS (
    UPDATE windrow.cold c SET retention = n.days
    FROM unnest(%(queues)s::text[], %(days)s::smallint[]) AS n (queue, days)
    JOIN windrow.queue q ON q.org = %(org)s AND q.queue = n.queue
    WHERE c.queue_id = q.queue_id AND {{org_of(c)}} = q.org_id
        AND c.retention = %(retention)s AND n.days <> %(retention)s
        AND (%(retention)s <> -1 OR %(day)s::date + n.days::integer > (now() AT TIME ZONE 'UTC')::date)
        AND c.finished_at >= %(day)s::date::timestamp AT TIME ZONE 'UTC'
        AND c.finished_at < (%(day)s::date + 1)::timestamp AT TIME ZONE 'UTC'
    RETURNING q.org_id, n.days
), counted AS MATERIALIZED (
    SELECT moved.org_id, moved.days, count(*) AS jobs FROM moved GROUP BY 1, 2
), struck AS (
    UPDATE windrow.archived a SET jobs = a.jobs - (SELECT sum(c.jobs) FROM counted c)
    WHERE a.retention = %(retention)s AND a.day = %(day)s::date AND a.org_id = (SELECT min(c.org_id) FROM counted c)
), entered AS (
    INSERT INTO windrow.archived AS a (retention, day, org_id, jobs)
    SELECT c.days, %(day)s::date, c.org_id, c.jobs FROM counted c
    ON CONFLICT (retention, day, org_id) DO UPDATE SET jobs = a.jobs + excluded.jobs
)
SELECT coalesce(sum(c.jobs), 0)::bigint FROM counted c
