-- Returns a node of a workflow by its name.
SELECT n.node, n.job_id::text, n.state
FROM windrow.workflow_node n
WHERE n.flow = %(flow)s AND n.name = %(name)s
