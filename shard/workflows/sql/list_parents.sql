-- Returns a page of the nodes for which a node waits, or waited, from the number `from_node` on.
SELECT p.node, p.name, p.job_id::text, p.state
FROM windrow.org o
JOIN windrow.workflow w ON w.org_id = o.org_id AND w.id = %(id)s::uuid
CROSS JOIN LATERAL (
    SELECT e.parent
    FROM windrow.workflow_edge e
    WHERE e.flow = w.flow AND e.node = %(node)s AND e.parent >= %(from_node)s
    ORDER BY e.parent
    LIMIT %(rows)s
) e
CROSS JOIN LATERAL (
    SELECT p.node, p.name, p.job_id, p.state FROM windrow.workflow_node p WHERE p.flow = w.flow AND p.node = e.parent OFFSET 0
) p
WHERE o.org = %(org)s
ORDER BY p.node
