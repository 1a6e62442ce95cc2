-- Collects a set of nodes, beginning with the given nodes. If a node N of the set waits for a node that N's job has
-- added and that has not ended, that node is in the set, too. If a node of the set waits for a node outside the set
-- that has not ended, returns the names of these two nodes.
WITH RECURSIVE reached AS (
    SELECT x.node FROM unnest(%(nodes)s::integer[]) AS x (node)
    UNION
    SELECT p.node
    FROM reached r
    -- OFFSET 0 makes Postgres find edges and nodes by their numbers, never by scans of all edges.
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
