-- Moves blocked jobs that have their signals, and that the caller has locked, to the finished ones. The signal becomes
-- the result. The lease is 0, which is the number of no lease. See cancel_blocked for the columns.
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
