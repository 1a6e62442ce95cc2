-- Returns a node of a workflow by its name.
SELECT n.node, n.job_id::text, n.ended_at IS NOT NULL AS has_ended
FROM windrow.workflow_node n
WHERE n.flow = %(flow)s AND n.name = %(name)s
