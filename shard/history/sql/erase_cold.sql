-- For an org that is being erased, erases up to `rows` jobs of one cold day, and removes these jobs from the books. If
-- the day has no more jobs of the org, removes the number that the books still show for that day. The condition on the
-- day is a range of times, so that Postgres plans for this partition only and locks no other partition.
WITH gone AS (
    DELETE FROM windrow.cold c
    WHERE c.retention = %(retention)s
        AND c.finished_at >= %(day)s::date::timestamp AT TIME ZONE 'UTC'
        AND c.finished_at < (%(day)s::date + 1)::timestamp AT TIME ZONE 'UTC'
        AND c.ctid = ANY (ARRAY(
            SELECT one.ctid
            FROM windrow.cold one
            WHERE one.retention = %(retention)s
                AND one.finished_at >= %(day)s::date::timestamp AT TIME ZONE 'UTC'
                AND one.finished_at < (%(day)s::date + 1)::timestamp AT TIME ZONE 'UTC'
                AND {{org_of(one)}} = %(org_id)s
            LIMIT %(rows)s
            FOR UPDATE
        ))
    RETURNING 1
), left_over AS (
    DELETE FROM windrow.archived a
    WHERE a.org_id = %(org_id)s AND a.retention = %(retention)s AND a.day = %(day)s::date AND NOT EXISTS (SELECT FROM gone)
    RETURNING a.jobs
), struck AS (
    UPDATE windrow.archived a SET jobs = a.jobs - (SELECT count(*) FROM gone)
    WHERE a.org_id = %(org_id)s AND a.retention = %(retention)s AND a.day = %(day)s::date AND EXISTS (SELECT FROM gone)
), uncounted AS (
    INSERT INTO windrow.tally (org_id, accepted)
    SELECT %(org_id)s, -jobs
    FROM (SELECT count(*) FROM gone UNION ALL SELECT left_over.jobs FROM left_over) AS taken (jobs)
    WHERE jobs <> 0
)
UPDATE windrow.erasure e SET cold = e.cold + (SELECT count(*) FROM gone)
WHERE e.org_id = %(org_id)s AND e.ended_at IS NULL
