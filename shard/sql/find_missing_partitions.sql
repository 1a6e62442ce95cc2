-- The UTC days from yesterday on for which the finished table has no partition: its name, its first day, the day after.
SELECT 'finished_' || to_char(day, 'YYYYMMDD'), to_char(day, 'YYYY-MM-DD'), to_char(day + 1, 'YYYY-MM-DD')
FROM generate_series(-1, %(days_ahead)s) AS n
CROSS JOIN LATERAL (SELECT (now() AT TIME ZONE 'UTC')::date + n::integer AS day) days
WHERE to_regclass('windrow.finished_' || to_char(day, 'YYYYMMDD')) IS NULL
