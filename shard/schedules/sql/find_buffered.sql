-- Returns for each of these schedules the first buffered run, which waits for the end of an earlier run.
SELECT n.id::text, r.at, r.cause
FROM unnest(%(schedules)s::uuid[]) AS n (id)
CROSS JOIN LATERAL (
    SELECT r.at, r.cause
    FROM windrow.schedule_run r
    WHERE r.schedule_id = n.id AND r.outcome = 'buffered'
    ORDER BY r.at
    LIMIT 1
) r
