-- A finished job whose retention changes moves to another partition. For Postgres that is a DELETE and an INSERT, so the
-- triggers of `finished` took the job for one that has just ended. Its end was appended once more and, if its slot has
-- moved to another shard, stayed for ever.

-- This is the trigger of 0019_workflows.sql, except that it passes over rows that only move (keep_finished.sql).
CREATE OR REPLACE FUNCTION windrow.note_end() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    org integer := NEW.queue_id & 4294967295;
    noted text := current_setting('windrow.workflows_noted', true);
    entry text := ',[' || org || ',"' || left(NEW.workflow_node, 36) || '"]';
BEGIN
    IF current_setting('windrow.history_moves', true) = 'on' THEN
        RETURN NULL;
    END IF;
    IF noted IS NULL OR strpos(noted, entry) = 0 THEN
        PERFORM set_config('windrow.workflows_noted', concat(noted, entry), true);
    END IF;
    INSERT INTO windrow.workflow_arrival (org_id, workflow, node, how)
    VALUES (org, left(NEW.workflow_node, 36)::uuid, substr(NEW.workflow_node, 38)::integer, TG_ARGV[0]);
    RETURN NULL;
END
$$;

-- For how many days a finished job of the queue is kept: {{retention_of}} of shard/postgres/sql_loader.py, for functions.
CREATE FUNCTION windrow.kept_days(of_queue bigint) RETURNS smallint LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT q.kept FROM windrow.queue q WHERE q.queue_id = of_queue AND q.kept IS NOT NULL), 30)::smallint
$$;

-- The time at which a job finishes: {{finish_time}}, for functions.
CREATE FUNCTION windrow.finish_time() RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT greatest(now(), (SELECT timestamptz 'epoch' + c.last_value * interval '1 us' FROM windrow.clock c))
$$;

-- These are the functions of 0019_workflows.sql and 0030_signals.sql, except that they use the two functions above.
CREATE OR REPLACE FUNCTION windrow.cancel_blocked(ctids tid[], reasons text[]) RETURNS bigint
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
        'SELECT ' || names || ', clock_timestamp(), ''cancelled'', g.why, windrow.finish_time(), '
        '    windrow.kept_days(g.queue_id) '
        'FROM gone g'
        USING ctids, reasons;
    GET DIAGNOSTICS cancelled = ROW_COUNT;
    RETURN cancelled;
END
$$;
CREATE OR REPLACE FUNCTION windrow.succeed_signalled(ctids tid[]) RETURNS bigint
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
        'SELECT ' || names || ', clock_timestamp(), ''succeeded'', 0, e.checkpoint, windrow.finish_time(), '
        '    windrow.kept_days(e.queue_id) '
        'FROM ended e'
        USING ctids;
    GET DIAGNOSTICS succeeded = ROW_COUNT;
    RETURN succeeded;
END
$$;
