-- Moves blocked jobs that the caller has locked to the finished ones. The columns that the two tables have in common
-- are read from the catalog, so that a later migration that adds one need not replace this function.
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
