-- Returns how many nodes a workflow has, callbacks included, and whether it is cancelled or paused. If `edges` is true,
-- also returns how many edges the workflow has.
SELECT
    (SELECT max(n.node) + 1 FROM windrow.workflow_node n WHERE n.flow = w.flow) AS nodes,
    CASE WHEN %(edges)s THEN (SELECT count(*) FROM windrow.workflow_edge e WHERE e.flow = w.flow) ELSE 0 END AS edges,
    w.cancelled_at IS NOT NULL AS is_cancelled, w.paused_at IS NOT NULL AS is_paused
FROM windrow.workflow w
WHERE w.flow = %(flow)s
