-- Forgets up to `rows` workflows that ended `days` days ago. Their jobs have a retention of their own. Keeps workflows
-- with a callback that waits, for example for the end of a pause. Without its workflow, such a callback would remain
-- blocked for ever.
WITH gone AS (
    DELETE FROM windrow.workflow w
    WHERE w.flow = ANY (ARRAY(
        SELECT old.flow
        FROM windrow.workflow old
        WHERE old.ended_at <= now() - %(days)s * interval '1 day'
            AND NOT EXISTS (
                SELECT FROM windrow.workflow_node n WHERE n.flow = old.flow AND n.is_left OFFSET 0
            )
        ORDER BY old.ended_at
        LIMIT %(rows)s
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING w.flow
), nodes AS (
    DELETE FROM windrow.workflow_node n USING gone WHERE n.flow = gone.flow
), edges AS (
    DELETE FROM windrow.workflow_edge e USING gone WHERE e.flow = gone.flow
)
SELECT count(*) FROM gone
