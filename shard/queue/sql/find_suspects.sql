-- Returns the kinds that have at least quarantine_after crashes (a setting of their queue), and the jobs that crashed.
-- The kinds with the most crashes come first.
SELECT c.queue_id, q.org, c.kind, q.quarantine_after, array_agg(c.job_id::text) AS jobs
FROM windrow.crash c
JOIN windrow.queue q ON q.queue_id = c.queue_id
GROUP BY c.queue_id, q.org, c.kind, q.quarantine_after
HAVING count(*) >= q.quarantine_after
ORDER BY count(*) DESC, c.queue_id, c.kind
LIMIT %(kinds_max)s
