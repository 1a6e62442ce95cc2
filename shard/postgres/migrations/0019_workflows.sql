-- LOCKS ACCESS EXCLUSIVE: cold, dead, departing, finished, job
-- Workflows: graphs of jobs (docs/decisions/0054-ends-of-nodes-are-appended-and-folded.md).

-- Which node of a workflow the job is: the workflow's id, a slash, and the node's number. NULL: it is in no workflow. The
-- hot table comes last: see 0004_reports.sql.
ALTER TABLE windrow.cold ADD COLUMN workflow_node text COLLATE "C";
ALTER TABLE windrow.finished ADD COLUMN workflow_node text COLLATE "C";
ALTER TABLE windrow.departing ADD COLUMN workflow_node text COLLATE "C";
ALTER TABLE windrow.dead ADD COLUMN workflow_node text COLLATE "C";

-- A job that waits for other nodes is blocked: it has no time yet.
--   lease IS NULL, run_at = 'infinity', visible_at = 'infinity'   blocked
ALTER TABLE windrow.job
    ADD COLUMN workflow_node text COLLATE "C",
    DROP CONSTRAINT waits_for_a_slot,
    ADD CONSTRAINT waits_for_a_slot_or_for_nodes CHECK (
        visible_at < 'infinity'
        OR lease IS NULL AND group_slot IS NULL
            AND CASE WHEN run_at < 'infinity' THEN group_key IS NOT NULL ELSE workflow_node IS NOT NULL END
    ) NOT VALID;

CREATE TABLE windrow.workflow (
    -- Its number on this shard.
    flow bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- No foreign key: orgs are deleted only by an erasure, after their workflows.
    org_id integer NOT NULL,
    -- A UUIDv7, made by the client.
    id uuid NOT NULL,
    name text NOT NULL,
    -- What the request said, so that another one with the same id is refused.
    digest bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    -- Nodes have the numbers from 0 on, in an order in which each comes after those that it waits for. Callbacks have the
    -- numbers after them.
    nodes integer NOT NULL CHECK (nodes >= 1),
    -- The node with the greatest number that has not ended. NULL: all have.
    open_node integer,
    paused_at timestamptz,
    cancelled_at timestamptz,
    reason text,
    -- How it ended.
    state text COLLATE "C" NOT NULL DEFAULT 'running' CHECK (state IN ('running', 'succeeded', 'failed', 'cancelled')),
    ended_at timestamptz,
    UNIQUE (org_id, id),
    CONSTRAINT runs_until_all_nodes_ended CHECK (
        (state = 'running') = (open_node IS NOT NULL) AND (state = 'running') = (ended_at IS NULL)
    )
);
CREATE INDEX workflow_ended ON windrow.workflow (ended_at) WHERE ended_at IS NOT NULL;

CREATE TABLE windrow.workflow_node (
    flow bigint NOT NULL,
    node integer NOT NULL,
    -- What the client calls it, unique in the workflow.
    name text COLLATE "C" NOT NULL,
    job_id uuid NOT NULL,
    -- For which end of the workflow it runs. NULL: it is not a callback.
    callback text COLLATE "C" CHECK (callback IN ('success', 'failure', 'end')),
    -- When its job becomes due, if it may run earlier: at this time, or so long after that moment.
    run_at timestamptz,
    delay_us bigint,
    -- One of the nodes that it waits for and that have not ended: that with the greatest number.
    waits_on integer,
    -- blocked: waits for nodes, or, as a callback, for the end of the workflow. due: its job is to be released. doomed:
    -- its job is to be cancelled. released: its job is live without waiting for nodes. The others are ends.
    state text COLLATE "C" NOT NULL CHECK (
        state IN ('blocked', 'due', 'doomed', 'released', 'succeeded', 'failed', 'cancelled', 'skipped')
    ),
    ended_at timestamptz,
    PRIMARY KEY (flow, node),
    CONSTRAINT blocked_waits CHECK ((state = 'blocked' AND callback IS NULL) = (waits_on IS NOT NULL)),
    CONSTRAINT ended_has_a_time CHECK (
        (state IN ('succeeded', 'failed', 'cancelled', 'skipped')) = (ended_at IS NOT NULL)
    )
) WITH (
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0
);
CREATE UNIQUE INDEX workflow_node_name ON windrow.workflow_node (flow, name);
CREATE INDEX workflow_node_waits ON windrow.workflow_node (flow, waits_on) WHERE waits_on IS NOT NULL;
-- Nodes whose jobs were locked, or are still on another shard.
CREATE INDEX workflow_node_due ON windrow.workflow_node (flow) WHERE state IN ('due', 'doomed');

CREATE TABLE windrow.workflow_edge (
    flow bigint NOT NULL,
    -- `node` waits for `parent`.
    node integer NOT NULL,
    parent integer NOT NULL CHECK (parent < node),
    -- What becomes of the node if the parent fails or is cancelled: cancel: it is cancelled; ignore: it runs as if the
    -- parent had succeeded; run: it runs, and the workflow fails.
    on_failed text COLLATE "C" NOT NULL CHECK (on_failed IN ('cancel', 'ignore', 'run')),
    PRIMARY KEY (flow, node, parent)
);
CREATE INDEX workflow_edge_parent ON windrow.workflow_edge (flow, parent);

-- Ends of nodes that no workflow has taken in yet. They are appended by the transactions that end jobs, so no end waits
-- for another one before its commit.
CREATE TABLE windrow.workflow_arrival (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    org_id integer NOT NULL,
    workflow uuid NOT NULL,
    node integer NOT NULL,
    how text COLLATE "C" NOT NULL CHECK (how IN ('succeeded', 'failed', 'cancelled', 'skipped'))
) WITH (
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX workflow_arrival_of ON windrow.workflow_arrival (org_id, workflow);

-- ── Folding ──────────────────────────────────────────────────────────────────────────────────────────────────────────

-- The rows of a workflow are only written under its lock, a bucket as in 0014_groups.sql. Locks of workflows come before
-- those of groups. Statements that begin after it see what the holders before it have committed: so of the last two
-- parents of a node, the second one sees the first.
CREATE FUNCTION windrow.lock_workflows(orgs integer[], workflows uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(17, b.bucket)
    FROM (
        SELECT DISTINCT (hashtextextended(n.workflow::text, n.org_id) & 1023)::integer AS bucket
        FROM unnest(orgs, workflows) AS n (org_id, workflow)
        ORDER BY bucket
    ) b;
    -- The close of a slot waits for this transaction from here on, and later ones see that it is closed.
    PERFORM FROM windrow.owned_slot LIMIT 1;
END
$$;

-- Moves blocked jobs that the caller has locked to the finished ones. The columns that the two tables have in common are
-- read from the catalog, so that a later migration that adds one need not replace this function.
CREATE FUNCTION windrow.cancel_blocked(ctids tid[], reasons text[]) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    names text;
    cancelled bigint;
BEGIN
    IF cardinality(ctids) = 0 THEN
        RETURN 0;
    END IF;
    SELECT string_agg(quote_ident(a.attname), ', ') INTO names
    FROM pg_attribute a
    JOIN pg_attribute b ON b.attrelid = 'windrow.finished'::regclass AND b.attname = a.attname
    WHERE a.attrelid = 'windrow.job'::regclass AND a.attnum > 0 AND NOT a.attisdropped AND a.attname <> 'run_at';
    EXECUTE
        'WITH gone AS ('
        '    DELETE FROM windrow.job j USING unnest($1, $2) AS n (at, why) WHERE j.ctid = n.at RETURNING j.*, n.why'
        ') INSERT INTO windrow.finished (' || names || ', run_at, state, reason, finished_at, retention) '
        'SELECT ' || names || ', clock_timestamp(), ''cancelled'', g.why, '
        '    greatest(now(), (SELECT timestamptz ''epoch'' + c.last_value * interval ''1 us'' FROM windrow.clock c)), '
        '    coalesce((SELECT q.kept FROM windrow.queue q WHERE q.queue_id = g.queue_id AND q.kept IS NOT NULL), 30) '
        'FROM gone g'
        USING ctids, reasons;
    GET DIAGNOSTICS cancelled = ROW_COUNT;
    RETURN cancelled;
END
$$;

-- Takes in the ends of nodes of these workflows, releases the jobs that need not wait any longer, and cancels those that
-- will never run. Returns the queues of the released jobs. Does nothing for orgs whose slots this shard does not own:
-- there the mover takes the arrivals to the shard that has the workflows.
--
-- Plans are made for empty tables too, so only lookups by indexes are allowed.
CREATE FUNCTION windrow.fold_workflows(orgs integer[], workflows uuid[]) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    ours_orgs integer[];
    ours_ids uuid[];
    ours bigint[];
    flows bigint[];
    nodes integer[];
    states text[];
    queues bigint[];
    released bigint[] := '{}';
    ctids tid[];
    reasons text[];
BEGIN
    PERFORM windrow.lock_workflows(orgs, workflows);
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
        RETURN released;
    END IF;
    ours := ARRAY(
        SELECT w.flow
        FROM unnest(ours_orgs, ours_ids) AS n (org_id, workflow)
        JOIN windrow.workflow w ON w.org_id = n.org_id AND w.id = n.workflow
    );
    LOOP
        -- An end counts once: a node that has ended stays as it is. Arrivals of a workflow that was forgotten are dropped.
        WITH taken AS (
            DELETE FROM windrow.workflow_arrival a
            WHERE a.number = ANY (ARRAY(
                SELECT b.number
                FROM unnest(ours_orgs, ours_ids) AS n (org_id, workflow)
                JOIN windrow.workflow_arrival b ON b.org_id = n.org_id AND b.workflow = n.workflow
            ))
            RETURNING a.*
        ), ended AS (
            UPDATE windrow.workflow_node n
            SET state = t.how, ended_at = clock_timestamp(), waits_on = NULL
            FROM (
                SELECT DISTINCT ON (w.flow, taken.node) w.flow, taken.node, taken.how
                FROM taken
                JOIN windrow.workflow w ON w.org_id = taken.org_id AND w.id = taken.workflow
                ORDER BY w.flow, taken.node, taken.number
            ) t
            WHERE n.flow = t.flow AND n.node = t.node AND n.ended_at IS NULL
            RETURNING n.flow, n.node, n.state, n.callback
        )
        SELECT array_agg(e.flow), array_agg(e.node), array_agg(e.state) INTO flows, nodes, states
        FROM ended e
        WHERE e.callback IS NULL;
        IF flows IS NOT NULL THEN
            PERFORM windrow.pass_on_ends(flows, nodes, states);
        END IF;
        -- A session that holds the lock of a workflow never waits for a locked row: the session that has locked it may wait
        -- for the lock. If that session ends the job, its own commit takes the end in. Otherwise a sweep finds the node.
        WITH freed AS MATERIALIZED (
            SELECT
                n.flow, n.node, j.ctid, j.queue_id, j.group_key,
                greatest(clock_timestamp(), n.run_at, clock_timestamp() + n.delay_us * interval '1 us') AS due
            FROM unnest(ours) AS f (flow)
            JOIN windrow.workflow w ON w.flow = f.flow AND w.paused_at IS NULL
            JOIN windrow.workflow_node n ON n.flow = f.flow AND n.state = 'due'
            CROSS JOIN LATERAL (
                SELECT j.ctid, j.queue_id, j.group_key
                FROM windrow.job j
                WHERE j.id = n.job_id AND j.queue_id & 4294967295 = w.org_id AND j.run_at = 'infinity'
                FOR UPDATE SKIP LOCKED
            ) j
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
        SELECT array_agg(DISTINCT f.queue_id) INTO queues FROM freed f;
        released := released || coalesce(queues, '{}');
        SELECT array_agg(d.ctid), array_agg(d.why) INTO ctids, reasons
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
        ) d;
        EXIT WHEN ctids IS NULL OR windrow.cancel_blocked(ctids, reasons) = 0;
    END LOOP;
    -- The loop has taken in the ends of the jobs that it cancelled.
    PERFORM set_config('windrow.workflows_noted', '', true);
    RETURN released;
END
$$;

-- Tells the nodes that wait for these ended nodes, and their workflows. The caller holds the locks of the workflows.
CREATE FUNCTION windrow.pass_on_ends(flows bigint[], nodes integer[], states text[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    ended bigint[];
BEGIN
    -- All nodes that will never run: those after a failed one, along the edges that say so.
    IF states && '{failed,cancelled}' THEN
        WITH RECURSIVE doomed AS (
            SELECT e.flow, e.node
            FROM unnest(flows, nodes, states) AS x (flow, node, state)
            JOIN windrow.workflow_edge e ON e.flow = x.flow AND e.parent = x.node AND e.on_failed = 'cancel'
            JOIN windrow.workflow_node b ON b.flow = e.flow AND b.node = e.node AND b.state = 'blocked'
            WHERE x.state IN ('failed', 'cancelled')
            UNION
            SELECT e.flow, e.node
            FROM doomed d
            JOIN windrow.workflow_edge e ON e.flow = d.flow AND e.parent = d.node AND e.on_failed = 'cancel'
            JOIN windrow.workflow_node b ON b.flow = e.flow AND b.node = e.node AND b.state = 'blocked'
        )
        UPDATE windrow.workflow_node n SET state = 'doomed', waits_on = NULL
        FROM doomed d
        WHERE n.flow = d.flow AND n.node = d.node;
    END IF;
    -- A node looks at one of its parents at a time, from the last one down. So a parent that nobody looks at costs
    -- nothing here, and each edge is looked at once.
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
        FROM unnest(flows, nodes) AS x (flow, node)
        JOIN windrow.workflow_node c ON c.flow = x.flow AND c.waits_on = x.node
    ) m
    WHERE n.flow = m.flow AND n.node = m.node;
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
END
$$;

-- The queues of jobs that may be released when these nodes of a workflow end, for a hint to those who wait for jobs.
CREATE FUNCTION windrow.queues_behind(org bigint, workflow_id uuid, ended integer[]) RETURNS SETOF bigint
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
            JOIN windrow.workflow_node n ON n.flow = w.flow AND n.node >= w.nodes
            WHERE w.org_id = org AND w.id = workflow_id AND w.open_node = ANY (ended)
        )
    ) b
    CROSS JOIN LATERAL (
        SELECT j.queue_id FROM windrow.job j WHERE j.id = b.job_id AND j.queue_id & 4294967295 = org OFFSET 0
    ) j
$$;

-- ── Triggers ─────────────────────────────────────────────────────────────────────────────────────────────────────────

-- Every statement that ends a job inserts it into `finished` or `dead`, or belongs to an erasure, which deletes the
-- workflows of the org too. So these triggers see every end, whichever statement and release it comes from. A job in no
-- workflow costs the evaluation of a WHEN.

CREATE FUNCTION windrow.note_end() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    org integer := NEW.queue_id & 4294967295;
    noted text := current_setting('windrow.workflows_noted', true);
    entry text := ',[' || org || ',"' || left(NEW.workflow_node, 36) || '"]';
BEGIN
    IF noted IS NULL OR strpos(noted, entry) = 0 THEN
        PERFORM set_config('windrow.workflows_noted', concat(noted, entry), true);
    END IF;
    INSERT INTO windrow.workflow_arrival (org_id, workflow, node, how)
    VALUES (org, left(NEW.workflow_node, 36)::uuid, substr(NEW.workflow_node, 38)::integer, TG_ARGV[0]);
    RETURN NULL;
END
$$;

CREATE FUNCTION windrow.fold_noted_workflows() RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    noted text := current_setting('windrow.workflows_noted', true);
    orgs integer[];
    workflows uuid[];
BEGIN
    IF noted <> '' THEN
        PERFORM set_config('windrow.workflows_noted', '', true);
        SELECT array_agg((e ->> 0)::integer), array_agg((e ->> 1)::uuid) INTO orgs, workflows
        FROM jsonb_array_elements(('[' || substr(noted, 2) || ']')::jsonb) e;
        PERFORM windrow.fold_workflows(orgs, workflows);
    END IF;
END
$$;

CREATE FUNCTION windrow.fold_at_commit() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM windrow.fold_noted_workflows();
    RETURN NULL;
END
$$;

CREATE TRIGGER workflow_success AFTER INSERT ON windrow.finished FOR EACH ROW
    WHEN (NEW.workflow_node IS NOT NULL AND NEW.state = 'succeeded') EXECUTE FUNCTION windrow.note_end('succeeded');
CREATE TRIGGER workflow_cancellation AFTER INSERT ON windrow.finished FOR EACH ROW
    WHEN (NEW.workflow_node IS NOT NULL AND NEW.state = 'cancelled') EXECUTE FUNCTION windrow.note_end('cancelled');
CREATE TRIGGER workflow_death AFTER INSERT ON windrow.dead FOR EACH ROW
    WHEN (NEW.workflow_node IS NOT NULL) EXECUTE FUNCTION windrow.note_end('failed');
-- Runs when the transaction commits, for each arrival. The first run folds all workflows that were noted.
CREATE CONSTRAINT TRIGGER workflow_fold AFTER INSERT ON windrow.workflow_arrival DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    EXECUTE FUNCTION windrow.fold_at_commit();
