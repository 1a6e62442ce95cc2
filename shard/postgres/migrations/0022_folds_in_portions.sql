-- LOCKS ACCESS EXCLUSIVE: workflow_arrival, workflow_edge
-- READS: workflow_edge
-- A fold releases and cancels at most a portion of jobs, and leaves the rest to others
-- (docs/decisions/0058-folds-in-portions.md).

-- Of an end that was appended again, because not all nodes were told of it: which nodes a failure has reached already, up
-- to this number. A mover need not carry it: the next fold then looks at them once more.
ALTER TABLE windrow.workflow_arrival ADD COLUMN reached integer NOT NULL DEFAULT -1;
-- In the order of nodes.
CREATE INDEX workflow_edge_child ON windrow.workflow_edge (flow, parent, node);
DROP INDEX windrow.workflow_edge_parent;

-- How many jobs a portion may release and cancel, and how many nodes it may tell of an end if they have few edges.
CREATE FUNCTION windrow.fold_room() RETURNS integer LANGUAGE sql STABLE AS 'SELECT 200';

-- Takes in what these workflows have left. If not all of it fits into a portion, tells the routers to go on. Returns the
-- queues of the released jobs. Waits for the locks of the workflows.
CREATE OR REPLACE FUNCTION windrow.fold_workflows(orgs integer[], workflows uuid[]) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    folded record;
BEGIN
    PERFORM windrow.lock_workflows(orgs, workflows);
    SELECT * INTO folded FROM windrow.fold_portion(orgs, workflows);
    IF folded.is_left THEN
        -- A notification holds less than 8,000 bytes.
        PERFORM pg_notify('windrow_work', 'fold ' || string_agg(l.org_id || '/' || l.workflow, ','))
        FROM (
            SELECT n.org_id, n.workflow, row_number() OVER () / 100 AS part
            FROM unnest(orgs, workflows) AS n (org_id, workflow)
            JOIN windrow.workflow w ON w.org_id = n.org_id AND w.id = n.workflow
            WHERE EXISTS (
                SELECT FROM windrow.workflow_arrival a WHERE a.org_id = n.org_id AND a.workflow = n.workflow OFFSET 0
            ) OR EXISTS (
                SELECT FROM windrow.workflow_node d WHERE d.flow = w.flow AND d.state IN ('due', 'doomed') OFFSET 0
            )
        ) l
        GROUP BY l.part;
    END IF;
    RETURN folded.released;
END
$$;

-- Takes in a portion of what a workflow has left. Returns the queues of the released jobs, and whether there is more. Does
-- nothing, and returns no queues, while others have its lock: so acks, which wait for it, come first.
CREATE FUNCTION windrow.fold_more(org integer, workflow uuid, OUT released bigint[], OUT is_left boolean)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF pg_try_advisory_xact_lock(17, (hashtextextended(workflow::text, org) & 1023)::integer) THEN
        -- The close of a slot waits for this transaction: see lock_workflows.
        PERFORM FROM windrow.owned_slot LIMIT 1;
        SELECT f.released, f.is_left INTO released, is_left
        FROM windrow.fold_portion(ARRAY[org], ARRAY[workflow]) f;
    ELSE
        is_left := true;
    END IF;
END
$$;

-- Takes in the ends of nodes of these workflows, releases the jobs that need not wait any longer, and cancels those that
-- will never run: at most a portion of them. Returns the queues of the released jobs, and whether more may be left. Does
-- nothing for orgs whose slots this shard does not own: there the mover takes the arrivals to the shard that has the
-- workflows. The caller holds the locks of the workflows, and took them in an earlier statement.
--
-- Plans are made for empty tables too, so only lookups by indexes are allowed.
CREATE FUNCTION windrow.fold_portion(orgs integer[], workflows uuid[], OUT released bigint[], OUT is_left boolean)
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    ours_orgs integer[];
    ours_ids uuid[];
    ours bigint[];
    -- Workflows that were cancelled and have not ended.
    to_cancel bigint[];
    flows bigint[];
    nodes integer[];
    states text[];
    reached integer[];
    queues bigint[];
    ctids tid[];
    reasons text[];
    room integer := windrow.fold_room();
    told integer;
    freed integer;
    cancelled integer;
BEGIN
    released := '{}';
    is_left := false;
    SELECT array_agg(n.org_id), array_agg(n.workflow) INTO ours_orgs, ours_ids
    FROM unnest(orgs, workflows) AS n (org_id, workflow)
    WHERE EXISTS (
        SELECT
        FROM windrow.org o
        JOIN windrow.owned_slot s ON s.slot = o.slot
        WHERE o.org_id = n.org_id AND s.state = 'owned'
        OFFSET 0
    );
    IF ours_ids IS NULL THEN
        RETURN;
    END IF;
    SELECT
        coalesce(array_agg(w.flow), '{}'),
        coalesce(array_agg(w.flow) FILTER (WHERE w.cancelled_at IS NOT NULL AND w.state = 'running'), '{}')
    INTO ours, to_cancel
    FROM unnest(ours_orgs, ours_ids) AS n (org_id, workflow)
    JOIN windrow.workflow w ON w.org_id = n.org_id AND w.id = n.workflow;
    LOOP
        told := 0;
        -- An end counts once: a node that has ended stays as it is. But not all nodes may have been told of its end.
        -- Arrivals of a workflow that was forgotten are dropped.
        WITH taken AS (
            DELETE FROM windrow.workflow_arrival a
            WHERE a.number = ANY (ARRAY(
                SELECT b.number
                FROM unnest(ours_orgs, ours_ids) AS n (org_id, workflow)
                JOIN windrow.workflow_arrival b ON b.org_id = n.org_id AND b.workflow = n.workflow
            ))
            RETURNING a.*
        ), arrived AS MATERIALIZED (
            SELECT DISTINCT ON (w.flow, taken.node) w.flow, taken.node, taken.how, taken.reached
            FROM taken
            JOIN windrow.workflow w ON w.org_id = taken.org_id AND w.id = taken.workflow
            ORDER BY w.flow, taken.node, taken.number
        ), ended AS (
            UPDATE windrow.workflow_node n
            SET state = t.how, ended_at = clock_timestamp(), waits_on = NULL
            FROM arrived t
            WHERE n.flow = t.flow AND n.node = t.node AND n.ended_at IS NULL
            RETURNING n.flow, n.node, n.state, t.reached, n.callback
        ), known AS (
            SELECT n.flow, n.node, n.state, t.reached, n.callback
            FROM arrived t
            JOIN windrow.workflow_node n ON n.flow = t.flow AND n.node = t.node AND n.ended_at IS NOT NULL
        )
        SELECT array_agg(e.flow), array_agg(e.node), array_agg(e.state), array_agg(e.reached)
        INTO flows, nodes, states, reached
        FROM (SELECT * FROM ended UNION ALL SELECT * FROM known) e
        WHERE e.callback IS NULL;
        IF flows IS NOT NULL THEN
            told := windrow.pass_on_ends(flows, nodes, states, reached, room);
        END IF;
        IF to_cancel <> '{}' THEN
            told := told + windrow.doom_cancelled(to_cancel, room);
        END IF;
        -- A session that holds the lock of a workflow never waits for a locked row: the session that has locked it may wait
        -- for the lock. If that session ends the job, its own commit takes the end in. Otherwise a sweep finds the node.
        WITH freed AS MATERIALIZED (
            SELECT
                n.flow, n.node, j.ctid, j.queue_id, j.group_key,
                greatest(clock_timestamp(), n.run_at, clock_timestamp() + n.delay_us * interval '1 us') AS due
            FROM unnest(ours) AS f (flow)
            JOIN windrow.workflow w ON w.flow = f.flow AND w.paused_at IS NULL
                AND NOT (w.cancelled_at IS NOT NULL AND w.state = 'running')
            JOIN windrow.workflow_node n ON n.flow = f.flow AND n.state = 'due'
            CROSS JOIN LATERAL (
                SELECT j.ctid, j.queue_id, j.group_key
                FROM windrow.job j
                WHERE j.id = n.job_id AND j.queue_id & 4294967295 = w.org_id AND j.run_at = 'infinity'
                FOR UPDATE SKIP LOCKED
            ) j
            LIMIT room
        ), shown AS (
            UPDATE windrow.job j
            SET
                run_at = f.due,
                -- A job of a group that is due waits for a slot; the trigger notes its group.
                visible_at = CASE WHEN f.group_key IS NOT NULL AND f.due <= clock_timestamp() THEN 'infinity' ELSE f.due END
            FROM freed f
            WHERE j.ctid = f.ctid
        ), moved_on AS (
            UPDATE windrow.workflow_node n SET state = 'released'
            FROM freed f
            WHERE n.flow = f.flow AND n.node = f.node
        )
        SELECT array_agg(DISTINCT f.queue_id), count(*) INTO queues, freed FROM freed f;
        released := released || coalesce(queues, '{}');
        SELECT coalesce(array_agg(d.ctid), '{}'), array_agg(d.why) INTO ctids, reasons
        FROM (
            SELECT
                j.ctid,
                CASE
                    WHEN n.callback IS NOT NULL THEN 'the workflow ' || CASE w.state WHEN 'cancelled' THEN 'was cancelled' ELSE w.state END
                    WHEN w.cancelled_at IS NOT NULL THEN coalesce(w.reason, 'cancelled')
                    ELSE 'a node that it waits for failed'
                END AS why
            FROM unnest(ours) AS f (flow)
            JOIN windrow.workflow w ON w.flow = f.flow
            JOIN windrow.workflow_node n ON n.flow = f.flow AND n.state = 'doomed'
            CROSS JOIN LATERAL (
                SELECT j.ctid
                FROM windrow.job j
                WHERE j.id = n.job_id AND j.queue_id & 4294967295 = w.org_id AND j.run_at = 'infinity'
                FOR UPDATE SKIP LOCKED
            ) j
            LIMIT room
        ) d;
        cancelled := windrow.cancel_blocked(ctids, reasons);
        room := room - greatest(told, freed + cancelled);
        is_left := room <= 0;
        -- The next round takes in the ends of the jobs that this one has cancelled.
        EXIT WHEN is_left OR cancelled = 0;
    END LOOP;
    PERFORM set_config('windrow.workflows_noted', '', true);
END
$$;

-- Tells the nodes that wait for these ended nodes, and their workflows. An end of which more nodes than `room` are to be
-- told is appended again. Returns how many nodes were told, more than `room` if some are left. The caller holds the locks
-- of the workflows.
DROP FUNCTION windrow.pass_on_ends(bigint[], integer[], text[]);
CREATE FUNCTION windrow.pass_on_ends(
    flows bigint[], nodes integer[], states text[], reached integer[], room integer
) RETURNS integer
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    ended bigint[];
    failed integer := 0;
    told integer;
    -- Workflows in which not all nodes are doomed that will never run.
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
    -- nothing here, and each edge is looked at once. Not before all are doomed that have to be: a node that looks no
    -- farther is released, whatever has become of its other parents.
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
                WHERE n.flow = w.flow AND n.node < w.open_node AND n.ended_at IS NULL
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

-- Dooms up to `room` nodes of cancelled workflows that were not released, and returns how many. If more are left, a sweep
-- finds these nodes, or the ends of their jobs. The caller holds the locks of the workflows.
CREATE FUNCTION windrow.doom_cancelled(flows bigint[], room integer) RETURNS integer
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
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
            SELECT b.flow, b.node FROM windrow.workflow_node b WHERE b.flow = f.flow AND b.state = 'due'
        ) b
        LIMIT room
    ) d
    WHERE n.flow = d.flow AND n.node = d.node;
    GET DIAGNOSTICS doomed = ROW_COUNT;
    RETURN doomed;
END
$$;
