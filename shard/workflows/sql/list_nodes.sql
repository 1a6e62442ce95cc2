-- Returns a page of the nodes of a workflow, from the number `from_node` on. Returns each node with the names of its
-- parents.
SELECT
    n.node, n.name, n.job_id::text, n.state, n.callback, n.ended_at, e.after, e.policies, n.run_at,
    n.delay_us, n.added_by, n.is_signal
FROM windrow.org o
JOIN windrow.workflow w ON w.org_id = o.org_id AND w.id = %(id)s::uuid
CROSS JOIN LATERAL (
    SELECT n.*
    FROM windrow.workflow_node n
    WHERE n.flow = w.flow AND n.node >= %(from_node)s
    ORDER BY n.node
    LIMIT %(rows)s
) n
CROSS JOIN LATERAL (
    SELECT array_agg(p.name ORDER BY e.parent) AS after, array_agg(e.on_failed ORDER BY e.parent) AS policies
    -- OFFSET 0 makes Postgres find edges and parents by the node's number, never by scans of all edges.
    FROM (SELECT e.parent, e.on_failed FROM windrow.workflow_edge e WHERE e.flow = n.flow AND e.node = n.node OFFSET 0) e
    CROSS JOIN LATERAL (
        SELECT p.name FROM windrow.workflow_node p WHERE p.flow = n.flow AND p.node = e.parent OFFSET 0
    ) p
) e
WHERE o.org = %(org)s
ORDER BY n.node
