-- Lets a node wait for these nodes too. An edge that exists stays as it is. Returns the new edges.
INSERT INTO windrow.workflow_edge (flow, node, parent, on_failed)
SELECT %(flow)s, %(node)s, p.parent, %(on_failed)s
FROM unnest(%(parents)s::integer[]) AS p (parent)
ON CONFLICT (flow, node, parent) DO NOTHING
RETURNING parent
