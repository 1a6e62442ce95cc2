-- Records that a cold day was dropped: moves its counts from the books of cold days to the counts of expired jobs.
-- Returns how many jobs the day had.
WITH gone AS (
    DELETE FROM windrow.archived a
    WHERE a.retention = %(retention)s AND a.day = %(day)s::date
    RETURNING a.org_id, a.jobs
), struck AS (
    INSERT INTO windrow.expired AS e (org_id, jobs)
    SELECT gone.org_id, gone.jobs FROM gone
    ON CONFLICT (org_id) DO UPDATE SET jobs = e.jobs + excluded.jobs
)
SELECT coalesce(sum(gone.jobs), 0)::bigint FROM gone
