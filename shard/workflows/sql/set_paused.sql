-- Pauses a workflow that runs, or ends a pause: also that of a workflow which has ended meanwhile, because its callbacks
-- wait for that. The caller holds its lock.
UPDATE windrow.workflow w SET paused_at = CASE WHEN %(paused)s THEN coalesce(w.paused_at, now()) END
WHERE w.flow = %(flow)s AND (w.state = 'running' OR NOT %(paused)s)
