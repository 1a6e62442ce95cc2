-- Cancels a workflow that runs, and ends its pause, so that its callbacks do not wait for that. The caller holds its lock,
-- and folds it then: that dooms its blocked nodes. The jobs that were released are left to the caller.
UPDATE windrow.workflow w
SET cancelled_at = coalesce(w.cancelled_at, now()), reason = coalesce(w.reason, %(reason)s), paused_at = NULL
WHERE w.flow = %(flow)s AND w.state = 'running'
