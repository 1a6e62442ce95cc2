-- If these nodes have ended, appends their ends once more, because nodes that wait for them were just added.
-- Afterwards, the caller must fold the workflow.
INSERT INTO windrow.workflow_arrival (org_id, workflow, node, how)
SELECT %(org_id)s, %(id)s::uuid, n.node, n.state
FROM windrow.workflow_node n
WHERE n.flow = %(flow)s AND n.node = ANY (%(nodes)s::integer[]) AND n.ended_at IS NOT NULL
