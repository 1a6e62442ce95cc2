-- Makes a node wait for these nodes, in addition to the nodes for which it waits already. If the node waits for one of
-- these nodes already, the new policy replaces the old policy. Returns the parents of the new edges.
WITH parent AS (
    SELECT p.number FROM unnest(%(parents)s::integer[]) AS p (number)
), changed AS (
    UPDATE windrow.workflow_edge e SET on_failed = %(on_failed)s
    FROM parent p
    WHERE e.flow = %(flow)s AND e.node = %(node)s AND e.parent = p.number AND e.on_failed <> %(on_failed)s
)
INSERT INTO windrow.workflow_edge (flow, node, parent, on_failed)
SELECT %(flow)s, %(node)s, p.number, %(on_failed)s
FROM parent p
ON CONFLICT (flow, node, parent) DO NOTHING
RETURNING parent
