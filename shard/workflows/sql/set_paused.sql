-- Pauses a workflow, or ends its pause. The caller holds its lock.
UPDATE windrow.workflow w SET paused_at = CASE WHEN %(paused)s THEN coalesce(w.paused_at, now()) END
WHERE w.flow = %(flow)s AND w.state = 'running'
