-- LOCKS ACCESS EXCLUSIVE: workflow, workflow_node
-- Lets jobs of a running workflow add nodes to it (docs/decisions/0069-jobs-add-nodes.md).

-- How many nodes were added. Their numbers come after those of the callbacks, which begin with `nodes`.
ALTER TABLE windrow.workflow ADD COLUMN added integer NOT NULL DEFAULT 0;
-- The node whose job added this one; NULL: it was stored with the workflow.
ALTER TABLE windrow.workflow_node ADD COLUMN added_by integer;

-- This is the function of 0022_folds_in_portions.sql, except that a workflow skips callbacks when it looks for nodes
-- that have not ended: nodes that were added have higher numbers than the callbacks.
CREATE OR REPLACE FUNCTION windrow.pass_on_ends(
    flows bigint[], nodes integer[], states text[], reached integer[], room integer
) RETURNS integer
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    ended bigint[];
    failed integer := 0;
    told integer;
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
    WITH waiting AS MATERIALIZED (
        SELECT c.*, row_number() OVER () AS turn, (count(*) OVER () - 1) * c.waits_on AS edges_max
        FROM (
            SELECT c.flow, c.node, c.waits_on
            FROM unnest(flows, nodes) AS x (flow, node)
            JOIN windrow.workflow_node c ON c.flow = x.flow AND c.waits_on = x.node
            WHERE x.flow <> ALL (unready)
            LIMIT room + 1
        ) c
    ), weighed AS MATERIALIZED (
        SELECT
            w.*,
            -- Twenty-five edges cost about as much as the release of a job. They are only counted if they may be many.
            sum(
                1 + CASE
                    WHEN w.edges_max > 25 * room THEN (
                        SELECT count(*)
                        FROM windrow.workflow_edge e
                        WHERE e.flow = w.flow AND e.node = w.node AND e.parent < w.waits_on
                    ) / 25
                    ELSE 0
                END
            ) OVER (ORDER BY w.turn) AS cost
        FROM waiting w
    ), looking AS MATERIALIZED (
        SELECT w.* FROM weighed w WHERE w.cost <= room OR w.turn = 1
    ), moved AS (
        UPDATE windrow.workflow_node n
        SET waits_on = m.next, state = CASE WHEN m.next IS NULL THEN 'due' ELSE 'blocked' END
        FROM (
            SELECT
                c.flow, c.node,
                (
                    SELECT e.parent
                    FROM windrow.workflow_edge e
                    JOIN windrow.workflow_node p ON p.flow = e.flow AND p.node = e.parent
                    WHERE e.flow = c.flow AND e.node = c.node AND e.parent < c.waits_on AND p.ended_at IS NULL
                    ORDER BY e.parent DESC
                    LIMIT 1
                ) AS next
            FROM looking c
        ) m
        WHERE n.flow = m.flow AND n.node = m.node
    )
    SELECT CASE WHEN count(*) < (SELECT count(*) FROM waiting) THEN room + 1 ELSE coalesce(max(l.cost), 0) END INTO told
    FROM looking l;
    IF told > room OR unready <> '{}' THEN
        INSERT INTO windrow.workflow_arrival (org_id, workflow, node, how, reached)
        SELECT w.org_id, w.id, x.node, x.state, x.reached
        FROM unnest(flows, nodes, states, reached) AS x (flow, node, state, reached)
        JOIN windrow.workflow w ON w.flow = x.flow
        WHERE EXISTS (
            SELECT FROM windrow.workflow_node c WHERE c.flow = x.flow AND c.waits_on = x.node OFFSET 0
        ) OR x.state IN ('failed', 'cancelled') AND EXISTS (
            SELECT
            FROM windrow.workflow_edge e
            WHERE e.flow = x.flow AND e.parent = x.node AND e.node > x.reached AND e.on_failed = 'cancel'
            OFFSET 0
        );
    END IF;
    -- A workflow looks at one of its nodes at a time, too.
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
    RETURN failed + told;
END
$$;

-- The queues of jobs that may be released when these nodes of a workflow end, for a hint to those who wait for jobs.
CREATE OR REPLACE FUNCTION windrow.queues_behind(org bigint, workflow_id uuid, ended integer[]) RETURNS SETOF bigint
LANGUAGE sql STABLE AS $$
    SELECT DISTINCT j.queue_id
    FROM (
        (
            SELECT n.job_id
            FROM windrow.workflow w
            JOIN windrow.workflow_node n ON n.flow = w.flow AND n.waits_on = ANY (ended)
            WHERE w.org_id = org AND w.id = workflow_id
            LIMIT 100
        )
        UNION ALL
        (
            SELECT n.job_id
            FROM windrow.workflow w
            -- At most 10 callbacks; nodes that were added come after them.
            JOIN windrow.workflow_node n ON n.flow = w.flow AND n.node >= w.nodes AND n.node < w.nodes + 10
                AND n.callback IS NOT NULL
            WHERE w.org_id = org AND w.id = workflow_id AND w.open_node = ANY (ended)
        )
    ) b
    CROSS JOIN LATERAL (
        SELECT j.queue_id FROM windrow.job j WHERE j.id = b.job_id AND j.queue_id & 4294967295 = org OFFSET 0
    ) j
$$;
