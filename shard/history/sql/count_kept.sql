-- Counts the finished jobs of the shard, including cold jobs. Also returns the newest UTC day on which a job finished
-- (NULL: there are no jobs). Jobs that were exported to a file count until their day is dropped.
SELECT hot.jobs + cold.jobs, to_char(greatest(hot.day, cold.day), 'YYYY-MM-DD')
FROM (
    SELECT count(*) AS jobs, (max(f.finished_at) AT TIME ZONE 'UTC')::date AS day FROM windrow.finished f
) hot
CROSS JOIN (
    SELECT coalesce(sum(a.jobs), 0)::bigint AS jobs, max(a.day) FILTER (WHERE a.jobs > 0) AS day FROM windrow.archived a
) cold
