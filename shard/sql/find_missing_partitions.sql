-- The UTC days from yesterday on, by retention in use, for which the finished table has no partition: their names, the
-- retention, the first day, the day after. Days that have turned cold need none, unless the clock has gone back.
SELECT p.name, p.retention, to_char(p.day, 'YYYY-MM-DD'), to_char(p.day + 1, 'YYYY-MM-DD')
FROM (
    SELECT 'finished_' || kept.retention || '_' || to_char(days.day, 'YYYYMMDD') AS name, kept.retention, days.day
    FROM (SELECT DISTINCT coalesce(q.kept, 30) AS retention FROM windrow.queue q UNION SELECT 30) kept
    CROSS JOIN generate_series(-1, %(days_ahead)s) AS n
    CROSS JOIN LATERAL (SELECT (now() AT TIME ZONE 'UTC')::date + n::integer AS day) days
    WHERE n >= 0 OR days.day + 1 > (SELECT a.until AT TIME ZONE 'UTC' FROM windrow.archive a)
) p
WHERE to_regclass('windrow.' || p.name) IS NULL
ORDER BY p.name
