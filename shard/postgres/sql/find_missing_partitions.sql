-- Finds the missing partitions of the table finished. Each retention in use needs a partition, and in it a partition
-- for each UTC day from yesterday on. Returns each partition's name, its retention, its day, and the day after. The
-- partition of a whole retention has NULL for both days, and comes before the partitions of its days. Yesterday needs
-- no partition if it has turned cold. Today and later days need a partition even if they have turned cold, because the
-- clock may have been set back. If the clock is behind the latest recorded time, jobs finish on the day of that
-- recorded time, so that day and the days after it need partitions too.
WITH kept AS (
    SELECT coalesce(q.kept, {{retention_default}}) AS retention FROM windrow.queue q UNION SELECT {{retention_default}}
), needed AS (
    SELECT days.day
    FROM generate_series(-1, %(days_ahead)s) AS n
    CROSS JOIN LATERAL (SELECT (now() AT TIME ZONE 'UTC')::date + n::integer AS day) days
    WHERE n >= 0 OR days.day + 1 > (SELECT a.until AT TIME ZONE 'UTC' FROM windrow.archive a)
    UNION
    SELECT (latest.time AT TIME ZONE 'UTC')::date + n::integer
    FROM generate_series(0, %(days_ahead)s) AS n
    CROSS JOIN (
        -- The view pg_sequences shows NULL to a role that may not read the sequence. Such a role finishes no jobs.
        SELECT timestamptz 'epoch' + s.last_value * interval '1 us' AS time
        FROM pg_sequences s
        WHERE s.schemaname = 'windrow' AND s.sequencename = 'clock'
    ) latest
    WHERE latest.time > now()
)
SELECT p.name, p.retention, to_char(p.day, 'YYYY-MM-DD'), to_char(p.day + 1, 'YYYY-MM-DD')
FROM (
    SELECT 'finished_' || kept.retention AS name, kept.retention, NULL::date AS day FROM kept
    UNION ALL
    SELECT 'finished_' || kept.retention || '_' || to_char(needed.day, 'YYYYMMDD'), kept.retention, needed.day
    FROM kept
    CROSS JOIN needed
) p
WHERE to_regclass('windrow.' || p.name) IS NULL
ORDER BY p.retention, p.day NULLS FIRST
