-- Pauses a workflow that runs, or ends its pause. The pause of a workflow that has ended meanwhile can be ended, too,
-- because its callbacks wait for that. The caller holds the lock of the workflow.
UPDATE windrow.workflow w SET paused_at = CASE WHEN %(paused)s THEN coalesce(w.paused_at, now()) END
WHERE w.flow = %(flow)s AND (w.state = 'running' OR NOT %(paused)s)
