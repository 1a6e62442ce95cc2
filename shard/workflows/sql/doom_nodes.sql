-- Cancels a workflow: its blocked nodes are doomed, and a pause ends, so that its callbacks do not wait for that. The
-- caller holds its lock, folds it then, and cancels the jobs that were released.
WITH cancelled AS (
    UPDATE windrow.workflow w
    SET cancelled_at = coalesce(w.cancelled_at, now()), reason = coalesce(w.reason, %(reason)s), paused_at = NULL
    WHERE w.flow = %(flow)s AND w.state = 'running'
    RETURNING w.flow
)
UPDATE windrow.workflow_node n SET state = 'doomed', waits_on = NULL
FROM cancelled
WHERE n.flow = cancelled.flow AND n.callback IS NULL AND n.state IN ('blocked', 'due')
