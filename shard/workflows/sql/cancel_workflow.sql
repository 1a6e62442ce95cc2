-- Cancels a workflow that runs. Also ends its pause, because otherwise its callbacks would wait for the end of the
-- pause. The caller must hold the lock of the workflow. After this statement, the caller must fold the workflow, which
-- dooms the blocked nodes. The caller must also cancel the jobs that were released.
UPDATE windrow.workflow w
SET cancelled_at = coalesce(w.cancelled_at, now()), reason = coalesce(w.reason, %(reason)s), paused_at = NULL
WHERE w.flow = %(flow)s AND w.state = 'running'
