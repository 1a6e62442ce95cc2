-- Appends once more the ends of these nodes, as far as they have ended, for nodes that were just added behind them. The
-- caller folds the workflow.
INSERT INTO windrow.workflow_arrival (org_id, workflow, node, how)
SELECT %(org_id)s, %(id)s::uuid, n.node, n.state
FROM windrow.workflow_node n
WHERE n.flow = %(flow)s AND n.node = ANY (%(nodes)s::integer[]) AND n.ended_at IS NOT NULL
