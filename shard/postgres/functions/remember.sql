-- Appends one ended attempt to a job's history and keeps the newest 50. `failure` is an object with type, message,
-- stack and permanent, each only if it is not empty. The newest 5 attempts keep their stacks and logs: with all of
-- them, an answer with this job could exceed 4 MiB, and every attempt that ends writes the whole history again. What is
-- dropped is dropped before the new entry is added: without a subquery, Postgres inlines the function, at a third of
-- the cost. The lease is stored as text, because JSON numbers cannot hold 64 bits safely.
CREATE OR REPLACE FUNCTION windrow.remember(
    history jsonb, attempt smallint, worker text, leased_at timestamptz, ended_at timestamptz, outcome text,
    lease bigint, failure jsonb, log text
) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN history IS NULL THEN '[]'
        WHEN jsonb_array_length(history) < 5 THEN history
        ELSE CASE WHEN jsonb_array_length(history) >= 50 THEN history - 0 ELSE history END
            #- '{-5,failure,stack}' #- '{-5,log}'
    END || jsonb_build_array(jsonb_strip_nulls(jsonb_build_object(
        'attempt', attempt, 'worker', worker, 'outcome', outcome, 'lease', lease::text, 'failure', failure, 'log', log,
        'leased_at_us', (extract(epoch FROM leased_at) * 1000000)::bigint,
        'ended_at_us', (extract(epoch FROM ended_at) * 1000000)::bigint
    )))
$$;

-- The same without a log. Routers before migration 0007 call it.
CREATE OR REPLACE FUNCTION windrow.remember(
    history jsonb, attempt smallint, worker text, leased_at timestamptz, ended_at timestamptz, outcome text,
    lease bigint, failure jsonb
) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN jsonb_array_length(longer.history) > 50 THEN longer.history - 0 ELSE longer.history END
        #- '{-6,failure,stack}'
    FROM (
        SELECT coalesce(history, '[]') || jsonb_build_array(jsonb_strip_nulls(jsonb_build_object(
            'attempt', attempt, 'worker', worker, 'outcome', outcome, 'lease', lease::text, 'failure', failure,
            'leased_at_us', (extract(epoch FROM leased_at) * 1000000)::bigint,
            'ended_at_us', (extract(epoch FROM ended_at) * 1000000)::bigint
        ))) AS history
    ) longer
$$;
