-- Tells the nodes that wait for these ended nodes, and their workflows. Returns how many nodes were told, more than
-- `room` if some are left; up to which nodes failures have come; and the ctids of the nodes whose last parent has
-- ended. These are still blocked: the caller releases them. The caller holds the locks of the workflows. Called by
-- fold_portion, whose settings count.
CREATE OR REPLACE FUNCTION windrow.pass_on_ends(
    flows bigint[], nodes integer[], states text[], INOUT reached integer[], room integer,
    OUT told integer, OUT ready tid[]
)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    waiting tid[];
    -- How many edges the waiting nodes may have together.
    edges_max bigint;
    ended bigint[];
    failed integer := 0;
    -- Workflows with nodes that will never run, but are not marked as doomed yet.
    unready bigint[] := '{}';
BEGIN
    -- The nodes that will never run: those after a failed one, along the edges that say so. If they are too many, nodes
    -- farther behind follow when those before them end.
    IF states && '{failed,cancelled}' THEN
        WITH RECURSIVE x AS MATERIALIZED (
            SELECT n.*
            FROM unnest(flows, nodes, states, reached) WITH ORDINALITY AS n (flow, node, state, reached, at)
        ), direct AS MATERIALIZED (
            SELECT x.flow, x.at, e.node
            FROM x
            CROSS JOIN LATERAL (
                SELECT e.node
                FROM windrow.workflow_edge e
                WHERE e.flow = x.flow AND e.parent = x.node AND e.node > x.reached AND e.on_failed = 'cancel'
                ORDER BY e.node
                LIMIT room + 1
            ) e
            WHERE x.state IN ('failed', 'cancelled')
            LIMIT room + 1
        ), doomed AS (
            SELECT d.flow, d.node
            FROM direct d
            JOIN windrow.workflow_node b ON b.flow = d.flow AND b.node = d.node AND b.state = 'blocked'
            UNION
            SELECT e.flow, e.node
            FROM doomed d
            JOIN windrow.workflow_edge e ON e.flow = d.flow AND e.parent = d.node AND e.on_failed = 'cancel'
            JOIN windrow.workflow_node b ON b.flow = e.flow AND b.node = e.node AND b.state = 'blocked'
        ), portion AS MATERIALIZED (
            SELECT d.flow, d.node FROM doomed d LIMIT room + 1
        ), marked AS (
            UPDATE windrow.workflow_node n SET state = 'doomed', waits_on = NULL
            FROM portion d
            WHERE n.flow = d.flow AND n.node = d.node
        )
        SELECT
            greatest((SELECT count(*) FROM direct), (SELECT count(*) FROM portion)),
            array_agg(greatest(x.reached, d.node) ORDER BY x.at)
        INTO failed, reached
        FROM x
        LEFT JOIN (SELECT d.at, max(d.node) AS node FROM direct d GROUP BY d.at) d ON d.at = x.at;
        IF failed > room THEN
            unready := ARRAY(
                SELECT DISTINCT x.flow
                FROM unnest(flows, nodes, states, reached) AS x (flow, node, state, reached)
                WHERE x.state IN ('failed', 'cancelled') AND EXISTS (
                    SELECT
                    FROM windrow.workflow_edge e
                    WHERE e.flow = x.flow AND e.parent = x.node AND e.node > x.reached AND e.on_failed = 'cancel'
                    OFFSET 0
                )
            );
        END IF;
    END IF;
    -- A node looks at one of its parents at a time, from the last one down. So a parent that nobody looks at costs
    -- nothing here, and each edge is looked at once. Workflows in `unready` must wait: a node that has no further
    -- parent to look at is released, whatever has become of its other parents.
    SELECT array_agg(c.ctid), count(*), (count(*) - 1) * max(c.waits_on) INTO waiting, told, edges_max
    FROM (
        SELECT c.ctid, c.waits_on
        FROM unnest(flows, nodes) AS x (flow, node)
        -- OFFSET 0 fences: find the nodes that wait for this one, never by a scan of all nodes that wait.
        CROSS JOIN LATERAL (
            SELECT c.ctid, c.waits_on
            FROM windrow.workflow_node c
            WHERE c.flow = x.flow AND c.waits_on = x.node
            OFFSET 0
        ) c
        WHERE x.flow <> ALL (unready)
        LIMIT room + 1
    ) c;
    IF edges_max > 25 * room THEN
        -- Twenty-five edges cost about as much as the release of a job. They are only counted if they may be many.
        SELECT array_agg(w.at), CASE WHEN count(*) < cardinality(waiting) THEN room + 1 ELSE max(w.cost) END
        INTO waiting, told
        FROM (
            SELECT
                w.at, w.turn,
                sum(
                    1 + (
                        SELECT count(*)
                        FROM windrow.workflow_edge e
                        WHERE e.flow = c.flow AND e.node = c.node AND e.parent < c.waits_on
                    ) / 25
                ) OVER (ORDER BY w.turn) AS cost
            FROM unnest(waiting) WITH ORDINALITY AS w (at, turn)
            JOIN windrow.workflow_node c ON c.ctid = w.at
        ) w
        WHERE w.cost <= room OR w.turn = 1;
    ELSIF told > room THEN
        waiting := waiting[:room];
    END IF;
    IF told > 0 THEN
        WITH next AS MATERIALIZED (
            SELECT
                c.ctid,
                (
                    SELECT e.parent
                    FROM windrow.workflow_edge e
                    JOIN windrow.workflow_node p ON p.flow = e.flow AND p.node = e.parent
                    WHERE e.flow = c.flow AND e.node = c.node AND e.parent < c.waits_on AND p.ended_at IS NULL
                    ORDER BY e.parent DESC
                    LIMIT 1
                ) AS parent
            FROM unnest(waiting) AS w (at)
            JOIN windrow.workflow_node c ON c.ctid = w.at
        ), moved AS (
            UPDATE windrow.workflow_node n SET waits_on = c.parent
            FROM next c
            WHERE n.ctid = c.ctid AND c.parent IS NOT NULL
        )
        SELECT array_agg(c.ctid) INTO ready FROM next c WHERE c.parent IS NULL;
    END IF;
    -- A workflow looks at one of its nodes at a time, too. This finds those that may look at one of these nodes.
    SELECT array_agg(w.flow) INTO ended
    FROM (SELECT DISTINCT x.flow FROM unnest(flows) AS x (flow)) x
    CROSS JOIN LATERAL (SELECT w.flow, w.open_node FROM windrow.workflow w WHERE w.flow = x.flow OFFSET 0) w
    WHERE w.open_node = ANY (pass_on_ends.nodes);
    IF ended IS NOT NULL THEN
        WITH looked AS MATERIALIZED (
            SELECT
                w.flow,
                (
                    SELECT n.node
                    FROM windrow.workflow_node n
                    WHERE n.flow = w.flow AND n.node < w.open_node AND n.ended_at IS NULL AND n.callback IS NULL
                    ORDER BY n.node DESC
                    LIMIT 1
                ) AS next
            FROM unnest(flows, nodes) AS x (flow, node)
            JOIN windrow.workflow w ON w.flow = x.flow AND w.open_node = x.node
        ), moved AS (
            UPDATE windrow.workflow w
            SET
                open_node = l.next,
                ended_at = CASE WHEN l.next IS NULL THEN clock_timestamp() END,
                state = CASE
                    WHEN l.next IS NOT NULL THEN 'running'
                    WHEN w.cancelled_at IS NOT NULL THEN 'cancelled'
                    WHEN EXISTS (
                        SELECT
                        FROM windrow.workflow_node n
                        WHERE n.flow = w.flow AND n.callback IS NULL AND n.state IN ('failed', 'cancelled')
                            -- A failure that all nodes after it ignore does not count.
                            AND coalesce(
                                (
                                    SELECT bool_or(e.on_failed <> 'ignore')
                                    FROM windrow.workflow_edge e
                                    WHERE e.flow = n.flow AND e.parent = n.node
                                ),
                                true
                            )
                    ) THEN 'failed'
                    ELSE 'succeeded'
                END
            FROM looked l
            WHERE w.flow = l.flow
            RETURNING w.flow, w.ended_at
        )
        SELECT array_agg(m.flow) INTO ended FROM moved m WHERE m.ended_at IS NOT NULL;
    END IF;
    IF ended IS NOT NULL THEN
        UPDATE windrow.workflow_node n
        SET state = CASE
            WHEN n.callback = 'end' OR n.callback = 'success' AND w.state = 'succeeded'
                OR n.callback = 'failure' AND w.state = 'failed' THEN 'due'
            ELSE 'doomed'
        END
        FROM unnest(ended) AS f (flow)
        JOIN windrow.workflow w ON w.flow = f.flow
        WHERE n.flow = f.flow AND n.node >= w.nodes AND n.state = 'blocked';
    END IF;
    told := told + failed;
END
$$;
