-- Returns days, each as its retention and its date. A day is returned if it has jobs of one of these queues, and its
-- retention is not the retention that was given for that queue. If `kind` is `finished`, the statement scans the jobs.
-- If `kind` is `cold`, the statement reads the books, which do not tell queues apart. A day of jobs that are kept for a
-- legal hold (retention -1) is returned only if the retention of one of these queues is not over for that day: see
-- keep_cold.sql.
WITH kept AS MATERIALIZED (
    SELECT q.queue_id, q.org_id, n.days
    FROM unnest(%(queues)s::text[], %(days)s::smallint[]) AS n (queue, days)
    JOIN windrow.queue q ON q.org = %(org)s AND q.queue = n.queue
)
SELECT DISTINCT f.retention, to_char(f.finished_at AT TIME ZONE 'UTC', 'YYYY-MM-DD')
FROM windrow.finished f
JOIN kept USING (queue_id)
WHERE %(kind)s::text = 'finished' AND f.retention <> kept.days
UNION
SELECT a.retention, to_char(a.day, 'YYYY-MM-DD')
FROM windrow.archived a
WHERE %(kind)s::text = 'cold' AND a.org_id = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    AND a.jobs > 0
    AND EXISTS (
        SELECT FROM kept
        WHERE kept.days <> a.retention
            AND (a.retention <> -1 OR a.day + kept.days > (now() AT TIME ZONE 'UTC')::date)
    )
ORDER BY 2, 1
