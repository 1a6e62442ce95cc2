-- LOCKS ACCESS EXCLUSIVE: workflow_node
-- Lets nodes of workflows wait for signals (docs/decisions/0072-a-signal-ends-a-job-that-never-runs.md).

-- Whether the node waits for a signal. Its job never runs. While the job is blocked, its `checkpoint` is the signal, if
-- that came early. When the job is released, it gets run_at = expires_at, the time until which the node waits. So a claim
-- that finds it cancels it, and hands it to nobody. Every statement that changes run_at keeps the two equal.
ALTER TABLE windrow.workflow_node ADD COLUMN is_signal boolean NOT NULL DEFAULT false;

-- Moves blocked jobs that have their signals, and that the caller has locked, to the finished ones. This is cancel_blocked
-- of 0019_workflows.sql for jobs that have succeeded: the signal becomes the result.
-- Their lease is 0, which is the number of no lease.
CREATE FUNCTION windrow.succeed_signalled(ctids tid[]) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    names text;
    succeeded bigint;
BEGIN
    IF cardinality(ctids) = 0 THEN
        RETURN 0;
    END IF;
    SELECT string_agg(quote_ident(a.attname), ', ') INTO names
    FROM pg_attribute a
    JOIN pg_attribute b ON b.attrelid = 'windrow.finished'::regclass AND b.attname = a.attname
    WHERE a.attrelid = 'windrow.job'::regclass AND a.attnum > 0 AND NOT a.attisdropped
        AND a.attname NOT IN ('run_at', 'checkpoint', 'lease');
    EXECUTE
        'WITH ended AS (DELETE FROM windrow.job j WHERE j.ctid = ANY ($1) RETURNING j.*) '
        'INSERT INTO windrow.finished (' || names || ', run_at, state, lease, result, finished_at, retention) '
        'SELECT ' || names || ', clock_timestamp(), ''succeeded'', 0, e.checkpoint, '
        '    greatest(now(), (SELECT timestamptz ''epoch'' + c.last_value * interval ''1 us'' FROM windrow.clock c)), '
        '    coalesce((SELECT q.kept FROM windrow.queue q WHERE q.queue_id = e.queue_id AND q.kept IS NOT NULL), 30) '
        'FROM ended e'
        USING ctids;
    GET DIAGNOSTICS succeeded = ROW_COUNT;
    RETURN succeeded;
END
$$;

-- This is the function of 0025_released_nodes_are_shown.sql, except that released jobs of signal nodes expire when they
-- become due, and that those which have their signals succeed at once.
CREATE OR REPLACE FUNCTION windrow.fold_portion(orgs integer[], workflows uuid[], OUT released bigint[], OUT is_left boolean)
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
    signalled tid[];
    ctids tid[];
    reasons text[];
    room integer := windrow.fold_room();
    told integer;
    freed integer;
    succeeded integer;
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
                n.flow, n.node, n.is_signal, j.ctid, j.queue_id, j.group_key,
                n.is_signal AND j.checkpoint IS NOT NULL AS has_signal,
                greatest(clock_timestamp(), n.run_at, clock_timestamp() + n.delay_us * interval '1 us') AS due
            FROM unnest(ours) AS f (flow)
            JOIN windrow.workflow w ON w.flow = f.flow AND w.paused_at IS NULL
                AND NOT (w.cancelled_at IS NOT NULL AND w.state = 'running')
            JOIN windrow.workflow_node n ON n.flow = f.flow AND n.state = 'due'
            CROSS JOIN LATERAL (
                SELECT j.ctid, j.queue_id, j.group_key, j.checkpoint
                FROM windrow.job j
                WHERE j.id = n.job_id AND j.queue_id & 4294967295 = w.org_id AND j.run_at = 'infinity'
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
                visible_at = CASE WHEN f.group_key IS NOT NULL AND f.due <= clock_timestamp() THEN 'infinity' ELSE f.due END
            FROM freed f
            WHERE j.ctid = f.ctid AND NOT f.has_signal
            RETURNING f.flow, f.node, f.queue_id
        ), moved_on AS (
            UPDATE windrow.workflow_node n SET state = 'released'
            FROM shown s
            WHERE n.flow = s.flow AND n.node = s.node
        )
        SELECT
            array_agg(DISTINCT s.queue_id), count(*),
            (SELECT coalesce(array_agg(f.ctid), '{}') FROM freed f WHERE f.has_signal)
        INTO queues, freed, signalled
        FROM shown s;
        succeeded := windrow.succeed_signalled(signalled);
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
        room := room - greatest(told, freed + succeeded + cancelled);
        is_left := room <= 0;
        -- The next round takes in the ends of the jobs that this one has ended.
        EXIT WHEN is_left OR succeeded + cancelled = 0;
    END LOOP;
    PERFORM set_config('windrow.workflows_noted', '', true);
END
$$;
