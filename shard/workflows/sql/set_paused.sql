-- Pauses a workflow that runs, or ends its pause. If the workflow has ended during its pause, the pause can still be
-- ended, because the callbacks wait for the end of the pause. The caller must hold the lock of the workflow.
UPDATE windrow.workflow w SET paused_at = CASE WHEN %(paused)s THEN coalesce(w.paused_at, now()) END
WHERE w.flow = %(flow)s AND (w.state = 'running' OR NOT %(paused)s)
