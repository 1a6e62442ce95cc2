-- Erases one cold day's jobs of an org that is being erased, and strikes them from the books. No row: no day is left.
WITH day AS MATERIALIZED (
    SELECT a.retention, a.day FROM windrow.archived a WHERE a.org_id = %(org_id)s ORDER BY a.day, a.retention LIMIT 1
), gone AS (
    DELETE FROM windrow.cold c
    USING day
    WHERE c.retention = day.retention
        AND c.finished_at >= day.day::timestamp AT TIME ZONE 'UTC'
        AND c.finished_at < (day.day + 1)::timestamp AT TIME ZONE 'UTC'
        AND c.queue_id & 4294967295 = %(org_id)s
    RETURNING 1
), struck AS (
    DELETE FROM windrow.archived a USING day WHERE a.org_id = %(org_id)s AND a.retention = day.retention AND a.day = day.day
    RETURNING a.jobs
), uncounted AS (
    INSERT INTO windrow.tally (org_id, accepted) SELECT %(org_id)s, -struck.jobs FROM struck
), noted AS (
    UPDATE windrow.erasure e SET cold = e.cold + (SELECT count(*) FROM gone)
    WHERE e.org_id = %(org_id)s AND e.ended_at IS NULL
)
SELECT count(*) FROM day HAVING count(*) > 0
