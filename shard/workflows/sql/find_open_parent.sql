-- Collects a set of nodes. It begins with the given nodes. For each node in the set, it also has the open nodes that
-- this node has added and waits for. If a node in the set waits for an open node outside the set, returns the names of
-- both.
WITH RECURSIVE reached AS (
    SELECT x.node FROM unnest(%(nodes)s::integer[]) AS x (node)
    UNION
    SELECT p.node
    FROM reached r
    -- OFFSET 0 fences: find edges and nodes by their numbers, never by scans of all edges.
    CROSS JOIN LATERAL (
        SELECT e.parent FROM windrow.workflow_edge e WHERE e.flow = %(flow)s AND e.node = r.node OFFSET 0
    ) e
    CROSS JOIN LATERAL (
        SELECT p.node
        FROM windrow.workflow_node p
        WHERE p.flow = %(flow)s AND p.node = e.parent AND p.ended_at IS NULL AND p.added_by = r.node
        OFFSET 0
    ) p
)
SELECT n.name, p.name AS parent
FROM reached r
CROSS JOIN LATERAL (
    SELECT e.parent FROM windrow.workflow_edge e WHERE e.flow = %(flow)s AND e.node = r.node OFFSET 0
) e
CROSS JOIN LATERAL (
    SELECT p.name
    FROM windrow.workflow_node p
    WHERE p.flow = %(flow)s AND p.node = e.parent AND p.ended_at IS NULL
    OFFSET 0
) p
CROSS JOIN LATERAL (
    SELECT n.name FROM windrow.workflow_node n WHERE n.flow = %(flow)s AND n.node = r.node OFFSET 0
) n
WHERE NOT EXISTS (SELECT FROM reached o WHERE o.node = e.parent)
LIMIT 1
