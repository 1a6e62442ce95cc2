-- Returns what the job of a node waits for: the node's name, whether the node waits for a signal, whether it has got
-- its signal already, whether its workflow is paused, the names of some nodes for which it waits and which have not
-- ended, and the number of these nodes, counted up to left_max. No row: the workflow or the node is not on this shard.
SELECT
    n.name, n.is_signal,
    n.is_signal AND EXISTS (
        SELECT FROM windrow.job j WHERE j.id = n.job_id AND {{org_of(j)}} = o.org_id AND j.checkpoint IS NOT NULL
    ) AS has_signal,
    w.paused_at IS NOT NULL AS paused, open.names[1:10] AS names,
    coalesce(open.count, 0) AS count
FROM windrow.org o
JOIN windrow.workflow w ON w.org_id = o.org_id AND w.id = %(workflow)s::uuid
JOIN windrow.workflow_node n ON n.flow = w.flow AND n.node = %(node)s
CROSS JOIN LATERAL (
    SELECT array_agg(p.name ORDER BY p.node) AS names, count(*) AS count
    FROM (
        SELECT p.node, p.name
        FROM windrow.workflow_edge e
        JOIN windrow.workflow_node p ON p.flow = e.flow AND p.node = e.parent AND p.ended_at IS NULL
        WHERE e.flow = n.flow AND e.node = n.node
        LIMIT %(left_max)s
    ) p
) open
WHERE o.org = %(org)s
