-- Counts the nodes of a workflow by their states, without callbacks.
SELECT n.state, count(*) AS nodes
FROM windrow.org o
JOIN windrow.workflow w ON w.org_id = o.org_id AND w.id = %(id)s::uuid
-- OFFSET 0 makes Postgres find the nodes by their workflow, never by a scan of all nodes.
CROSS JOIN LATERAL (SELECT n.state FROM windrow.workflow_node n WHERE n.flow = w.flow AND n.callback IS NULL OFFSET 0) n
WHERE o.org = %(org)s
GROUP BY n.state
