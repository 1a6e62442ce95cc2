-- Returns the newest runs of a schedule.
SELECT r.at, r.cause, r.outcome, r.through, r.skipped_for, r.job_id::text, r.decided_at
FROM windrow.schedule_run r
WHERE r.schedule_id = %(id)s::uuid
ORDER BY r.at DESC
LIMIT %(rows)s
