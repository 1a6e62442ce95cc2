-- Kinds with as many crashes as their queues allow, those with most first, and the jobs that crashed.
SELECT c.queue_id, q.org, c.kind, q.quarantine_after, array_agg(c.job_id::text) AS jobs
FROM windrow.crash c
JOIN windrow.queue q ON q.queue_id = c.queue_id
GROUP BY c.queue_id, q.org, c.kind, q.quarantine_after
HAVING count(*) >= q.quarantine_after
ORDER BY count(*) DESC, c.queue_id, c.kind
LIMIT %(kinds_max)s
