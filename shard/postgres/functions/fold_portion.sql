-- Takes in the ends of nodes of these workflows, releases the jobs that need not wait any longer, and cancels those
-- that will never run: at most a portion of them. Released jobs of nodes that wait for signals expire when they become
-- due; those that have their signals succeed at once. Returns the queues of the released jobs, and whether more may be
-- left. Does nothing for orgs whose slots this shard does not own: there the mover takes the arrivals to the shard that
-- has the workflows. The caller holds the locks of the workflows, and took them in an earlier statement.
--
-- Plans are made for empty tables too, so only lookups by indexes are allowed: the settings of fold_workflows and
-- fold_more, which call it, see to that. Some rows of nodes are found by ctids that an earlier statement of this
-- transaction has read: only the holder of a workflow's lock writes its rows, so nobody else has changed them since.
CREATE OR REPLACE FUNCTION windrow.fold_portion(
    orgs integer[], workflows uuid[], OUT released bigint[], OUT is_left boolean
)
LANGUAGE plpgsql VOLATILE AS $$
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
    ended integer;
    arrived_flows bigint[];
    arrived_nodes integer[];
    arrived_reached integer[];
    -- Workflows that release jobs, and their orgs.
    open_flows bigint[];
    open_orgs integer[];
    has_left boolean;
    -- Nodes whose last parent has ended in this round.
    ready tid[];
    queues bigint[];
    signalled tid[];
    ctids tid[];
    reasons text[];
    room integer := windrow.fold_room();
    told integer;
    freed integer;
    freed_at_once integer;
    is_untold boolean := false;
    succeeded integer;
    cancelled integer;
BEGIN
    released := '{}';
    is_left := false;
    SELECT
        array_agg(n.org_id), array_agg(n.workflow), array_agg(w.flow),
        coalesce(array_agg(w.flow) FILTER (WHERE w.cancelled_at IS NOT NULL AND w.state = 'running'), '{}')
    INTO ours_orgs, ours_ids, ours, to_cancel
    FROM unnest(orgs, workflows) AS n (org_id, workflow)
    LEFT JOIN windrow.workflow w ON w.org_id = n.org_id AND w.id = n.workflow
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
    LOOP
        told := 0;
        ready := NULL;
        -- An end counts once: a node that has ended stays as it is. Arrivals of a workflow that was forgotten are
        -- dropped.
        WITH taken AS (
            DELETE FROM windrow.workflow_arrival a
            USING (
                SELECT n.flow, b.ctid
                FROM unnest(ours_orgs, ours_ids, ours) AS n (org_id, workflow, flow)
                -- OFFSET 0 fences: find the rows of these workflows, never by a scan of all.
                CROSS JOIN LATERAL (
                    SELECT b.ctid
                    FROM windrow.workflow_arrival b
                    WHERE b.org_id = n.org_id AND b.workflow = n.workflow
                    OFFSET 0
                ) b
            ) b
            WHERE a.ctid = b.ctid
            RETURNING b.flow, a.node, a.how, a.reached, a.number
        ), arrived AS MATERIALIZED (
            SELECT DISTINCT ON (t.flow, t.node) t.flow, t.node, t.how, t.reached
            FROM taken t
            WHERE t.flow IS NOT NULL
            ORDER BY t.flow, t.node, t.number
        ), ended AS (
            UPDATE windrow.workflow_node n
            SET state = t.how, ended_at = clock_timestamp(), waits_on = NULL
            FROM (
                SELECT t.how, t.reached, c.ctid
                FROM arrived t
                CROSS JOIN LATERAL (
                    SELECT c.ctid
                    FROM windrow.workflow_node c
                    WHERE c.flow = t.flow AND c.node = t.node AND c.ended_at IS NULL
                    OFFSET 0
                ) c
            ) t
            WHERE n.ctid = t.ctid
            RETURNING n.flow, n.node, n.state, t.reached, n.callback
        )
        SELECT
            count(*), array_agg(e.flow) FILTER (WHERE e.callback IS NULL),
            array_agg(e.node) FILTER (WHERE e.callback IS NULL), array_agg(e.state) FILTER (WHERE e.callback IS NULL),
            array_agg(e.reached) FILTER (WHERE e.callback IS NULL),
            ARRAY(SELECT a.flow FROM arrived a), ARRAY(SELECT a.node FROM arrived a),
            ARRAY(SELECT a.reached FROM arrived a)
        INTO ended, flows, nodes, states, reached, arrived_flows, arrived_nodes, arrived_reached
        FROM ended e;
        IF ended < cardinality(arrived_nodes) THEN
            -- Some have ended before, but not all nodes may have been told of their ends.
            SELECT array_agg(n.flow), array_agg(n.node), array_agg(n.state), array_agg(t.reached)
            INTO flows, nodes, states, reached
            FROM unnest(arrived_flows, arrived_nodes, arrived_reached) AS t (flow, node, reached)
            CROSS JOIN LATERAL (
                SELECT n.* FROM windrow.workflow_node n WHERE n.flow = t.flow AND n.node = t.node OFFSET 0
            ) n
            WHERE n.ended_at IS NOT NULL AND n.callback IS NULL;
        END IF;
        IF flows IS NOT NULL THEN
            SELECT p.* INTO reached, told, ready
            FROM windrow.pass_on_ends(flows, nodes, states, reached, room) p;
            is_untold := told > room;
        END IF;
        IF to_cancel <> '{}' THEN
            told := told + windrow.doom_cancelled(to_cancel, room);
        END IF;
        -- A session that holds the lock of a workflow never waits for a locked row: the session that has locked it may
        -- wait for the lock. If that session ends the job, its own commit takes the end in. Otherwise a sweep finds the
        -- node.
        SELECT array_agg(w.flow), array_agg(w.org_id) INTO open_flows, open_orgs
        FROM unnest(ours) AS f (flow)
        CROSS JOIN LATERAL (SELECT w.* FROM windrow.workflow w WHERE w.flow = f.flow OFFSET 0) w
        WHERE w.paused_at IS NULL AND NOT (w.cancelled_at IS NOT NULL AND w.state = 'running');
        has_left := EXISTS (
            SELECT
            FROM unnest(ours) AS f (flow)
            CROSS JOIN LATERAL (SELECT FROM windrow.workflow_node n WHERE n.flow = f.flow AND n.is_left LIMIT 1) n
        );
        freed := 0;
        succeeded := 0;
        cancelled := 0;
        IF ready IS NOT NULL OR has_left THEN
            WITH candidate AS (
                SELECT n.ctid, n.flow, n.job_id, n.is_signal, n.run_at, n.delay_us, true AS is_ready
                FROM unnest(ready) AS r (at)
                JOIN windrow.workflow_node n ON n.ctid = r.at
                UNION ALL
                SELECT n.ctid, n.flow, n.job_id, n.is_signal, n.run_at, n.delay_us, false
                FROM unnest(open_flows) AS f (flow)
                CROSS JOIN LATERAL (
                    SELECT n.ctid, n.*
                    FROM windrow.workflow_node n
                    WHERE n.flow = f.flow AND n.is_left AND n.state = 'due'
                    OFFSET 0
                ) n
            ), freed AS MATERIALIZED (
                SELECT
                    c.ctid AS at, c.is_ready, c.is_signal, j.ctid, j.queue_id, j.group_key,
                    c.is_signal AND j.checkpoint IS NOT NULL AS has_signal,
                    greatest(clock_timestamp(), c.run_at, clock_timestamp() + c.delay_us * interval '1 us') AS due
                FROM candidate c
                CROSS JOIN LATERAL (
                    SELECT j.ctid, j.queue_id, j.group_key, j.checkpoint
                    FROM windrow.job j
                    WHERE j.id = c.job_id AND j.run_at = 'infinity'
                        AND j.queue_id & 4294967295 = open_orgs[array_position(open_flows, c.flow)]
                    FOR UPDATE SKIP LOCKED
                ) j
                LIMIT room
            ), shown AS (
                UPDATE windrow.job j
                SET
                    run_at = f.due,
                    -- A job that waits for a signal is never due before it has expired, so no worker gets it.
                    expires_at = CASE WHEN f.is_signal THEN f.due ELSE j.expires_at END,
                    -- A job of a group that is due waits for a slot; the trigger notes its group.
                    visible_at = CASE
                        WHEN f.group_key IS NOT NULL AND f.due <= clock_timestamp() THEN 'infinity'
                        ELSE f.due
                    END
                FROM freed f
                WHERE j.ctid = f.ctid AND NOT f.has_signal
                RETURNING f.at, f.is_ready, f.queue_id
            ), moved_on AS (
                UPDATE windrow.workflow_node n SET state = 'released', waits_on = NULL
                FROM shown s
                WHERE n.ctid = s.at
            )
            SELECT
                array_agg(DISTINCT s.queue_id), count(*), count(*) FILTER (WHERE s.is_ready),
                (SELECT coalesce(array_agg(f.ctid), '{}') FROM freed f WHERE f.has_signal)
            INTO queues, freed, freed_at_once, signalled
            FROM shown s;
            IF freed_at_once < cardinality(ready) THEN
                -- The others wait for a lock, for the end of a pause or for the next portion, are doomed, or have their
                -- signals.
                UPDATE windrow.workflow_node n SET state = 'due', waits_on = NULL
                FROM unnest(ready) AS r (at)
                WHERE n.ctid = r.at AND n.state = 'blocked';
            END IF;
            succeeded := windrow.succeed_signalled(signalled);
            released := released || coalesce(queues, '{}');
        END IF;
        IF is_untold THEN
            PERFORM windrow.append_untold(flows, nodes, states, reached);
        END IF;
        IF has_left THEN
            SELECT coalesce(array_agg(d.ctid), '{}'), array_agg(d.why) INTO ctids, reasons
            FROM (
                SELECT
                    j.ctid,
                    CASE
                        WHEN n.callback IS NOT NULL
                            THEN 'the workflow ' || CASE w.state WHEN 'cancelled' THEN 'was cancelled' ELSE w.state END
                        WHEN w.cancelled_at IS NOT NULL THEN coalesce(w.reason, 'cancelled')
                        ELSE 'a node that it waits for failed'
                    END AS why
                FROM unnest(ours) AS f (flow)
                CROSS JOIN LATERAL (SELECT w.* FROM windrow.workflow w WHERE w.flow = f.flow OFFSET 0) w
                CROSS JOIN LATERAL (
                    SELECT n.callback, n.job_id
                    FROM windrow.workflow_node n
                    WHERE n.flow = f.flow AND n.is_left AND n.state = 'doomed'
                    OFFSET 0
                ) n
                CROSS JOIN LATERAL (
                    SELECT j.ctid
                    FROM windrow.job j
                    WHERE j.id = n.job_id AND j.queue_id & 4294967295 = w.org_id AND j.run_at = 'infinity'
                    FOR UPDATE SKIP LOCKED
                ) j
                LIMIT room
            ) d;
            cancelled := windrow.cancel_blocked(ctids, reasons);
        END IF;
        room := room - greatest(told, freed + succeeded + cancelled);
        is_left := room <= 0;
        -- The next round takes in the ends of the jobs that this one has ended.
        EXIT WHEN is_left OR succeeded + cancelled = 0;
    END LOOP;
    PERFORM set_config('windrow.workflows_noted', '', true);
END
$$;
