-- Looks for one of these nodes that may wait for the job that has added them: it waits for a node that has not ended, that
-- is not among these nodes, and that its own job has not added. Returns the names of both, for one such node at most.
SELECT n.name, p.name AS parent
FROM unnest(%(nodes)s::integer[]) AS x (node)
-- OFFSET 0 fences: find edges and nodes by their numbers, never by scans of all of them.
CROSS JOIN LATERAL (
    SELECT e.parent FROM windrow.workflow_edge e WHERE e.flow = %(flow)s AND e.node = x.node OFFSET 0
) e
CROSS JOIN LATERAL (
    SELECT p.name FROM windrow.workflow_node p
    WHERE p.flow = %(flow)s AND p.node = e.parent AND p.ended_at IS NULL AND p.added_by IS DISTINCT FROM x.node
    OFFSET 0
) p
CROSS JOIN LATERAL (
    SELECT n.name FROM windrow.workflow_node n WHERE n.flow = %(flow)s AND n.node = x.node OFFSET 0
) n
WHERE e.parent NOT IN (SELECT unnest(%(nodes)s::integer[]))
LIMIT 1
