-- Cancels a workflow: its blocked nodes are doomed. The caller holds its lock, folds it then, and cancels the jobs that
-- were released.
WITH cancelled AS (
    UPDATE windrow.workflow w SET cancelled_at = coalesce(w.cancelled_at, now()), reason = coalesce(w.reason, %(reason)s)
    WHERE w.flow = %(flow)s AND w.state = 'running'
    RETURNING w.flow
)
UPDATE windrow.workflow_node n SET state = 'doomed', waits_on = NULL
FROM cancelled
WHERE n.flow = cancelled.flow AND n.callback IS NULL AND n.state IN ('blocked', 'due')
