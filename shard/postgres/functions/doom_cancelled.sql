-- Dooms up to `room` nodes of cancelled workflows that were not released, and returns how many. If more are left, a
-- sweep finds these nodes, or the ends of their jobs. The caller holds the locks of the workflows. Called by
-- fold_portion, whose settings count.
CREATE OR REPLACE FUNCTION windrow.doom_cancelled(flows bigint[], room integer) RETURNS integer
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    doomed integer;
BEGIN
    UPDATE windrow.workflow_node n SET state = 'doomed', waits_on = NULL
    FROM (
        SELECT b.flow, b.node
        FROM unnest(flows) AS f (flow)
        -- Its end may have been taken in meanwhile, and its callbacks are due.
        JOIN windrow.workflow w ON w.flow = f.flow AND w.state = 'running'
        CROSS JOIN LATERAL (
            SELECT b.flow, b.node FROM windrow.workflow_node b WHERE b.flow = f.flow AND b.waits_on IS NOT NULL
            UNION ALL
            SELECT b.flow, b.node FROM windrow.workflow_node b WHERE b.flow = f.flow AND b.is_left AND b.state = 'due'
        ) b
        LIMIT room
    ) d
    WHERE n.flow = d.flow AND n.node = d.node;
    GET DIAGNOSTICS doomed = ROW_COUNT;
    RETURN doomed;
END
$$;
