-- Of these ends, appends those again of which some nodes have not been told. So the next portion goes on with them.
-- `reached`: up to which nodes failures have come. Called by fold_portion, whose settings count.
CREATE OR REPLACE FUNCTION windrow.append_untold(flows bigint[], nodes integer[], states text[], reached integer[])
RETURNS void
LANGUAGE sql VOLATILE AS $$
    INSERT INTO windrow.workflow_arrival (org_id, workflow, node, how, reached, is_first)
    SELECT w.org_id, w.id, x.node, x.state, x.reached, false
    FROM unnest(flows, nodes, states, reached) AS x (flow, node, state, reached)
    JOIN windrow.workflow w ON w.flow = x.flow
    WHERE EXISTS (
        SELECT FROM windrow.workflow_node c WHERE c.flow = x.flow AND c.waits_on = x.node OFFSET 0
    ) OR x.state IN ('failed', 'cancelled') AND EXISTS (
        SELECT
        FROM windrow.workflow_edge e
        WHERE e.flow = x.flow AND e.parent = x.node AND e.node > x.reached AND e.on_failed = 'cancel'
        OFFSET 0
    )
$$;
