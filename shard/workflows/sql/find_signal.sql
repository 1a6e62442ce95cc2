-- Finds, by its name, a node that is to get a signal. `node` is NULL if the workflow has no node of this name.
SELECT n.node, n.job_id::text, n.state, n.is_signal, w.state AS flow_state, w.cancelled_at IS NOT NULL AS is_cancelled
FROM windrow.org o
JOIN windrow.workflow w ON w.org_id = o.org_id AND w.id = %(id)s::uuid
LEFT JOIN LATERAL (
    SELECT n.* FROM windrow.workflow_node n WHERE n.flow = w.flow AND n.name = %(name)s OFFSET 0
) n ON true
WHERE o.org = %(org)s
