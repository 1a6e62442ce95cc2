-- Finds one of these nodes that waits for a node which has not ended, is not among them, and was not added by the job of
-- the node that waits. Returns the names of both.
SELECT n.name, p.name AS parent
FROM unnest(%(nodes)s::integer[]) AS x (node)
-- OFFSET 0 fences: find edges and nodes by their numbers, never by scans of all edges.
CROSS JOIN LATERAL (
    SELECT e.parent
    FROM windrow.workflow_edge e
    WHERE e.flow = %(flow)s AND e.node = x.node AND e.parent <> ALL (%(nodes)s::integer[])
    OFFSET 0
) e
CROSS JOIN LATERAL (
    SELECT p.name
    FROM windrow.workflow_node p
    WHERE p.flow = %(flow)s AND p.node = e.parent AND p.ended_at IS NULL AND p.added_by IS DISTINCT FROM x.node
    OFFSET 0
) p
CROSS JOIN LATERAL (
    SELECT n.name FROM windrow.workflow_node n WHERE n.flow = %(flow)s AND n.node = x.node OFFSET 0
) n
LIMIT 1
