-- Drops up to `rows` jobs that were kept for a legal hold and whose orgs are not under hold any more. Records this in
-- the books. Skips jobs whose ids enqueues may still repeat: see find_days.sql.
WITH gone AS (
    DELETE FROM windrow.cold_held c
    WHERE c.ctid = ANY (ARRAY(
        SELECT aside.ctid
        FROM windrow.cold_held aside
        WHERE {{org_of(aside)}} IN (
            SELECT a.org_id FROM windrow.archived a JOIN windrow.org o USING (org_id) WHERE a.retention = -1 AND NOT o.held
        )
            AND aside.finished_at < now() - interval '8 days'
        LIMIT %(rows)s
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING ({{org_of(c)}})::integer AS org_id, (c.finished_at AT TIME ZONE 'UTC')::date AS day
), counted AS MATERIALIZED (
    SELECT gone.org_id, gone.day, count(*) AS jobs FROM gone GROUP BY 1, 2
), struck AS (
    UPDATE windrow.archived a SET jobs = a.jobs - c.jobs
    FROM counted c
    WHERE a.retention = -1 AND a.day = c.day AND a.org_id = c.org_id
), entered AS (
    INSERT INTO windrow.expired AS e (org_id, jobs)
    SELECT c.org_id, sum(c.jobs) FROM counted c GROUP BY 1 ORDER BY 1
    ON CONFLICT (org_id) DO UPDATE SET jobs = e.jobs + excluded.jobs
)
SELECT count(*) FROM gone
