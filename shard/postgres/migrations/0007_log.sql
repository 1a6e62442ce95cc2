-- LOCKS ACCESS EXCLUSIVE: job
-- What the attempt under way has logged, as the newest extend reported it: a text of lines, the oldest first. NULL if it
-- has logged nothing. When the lease ends, the text goes into the attempt's entry in `history`, so the other tables of
-- jobs have no such column.
ALTER TABLE windrow.job ADD COLUMN log text;

-- As windrow.remember without `log`, which routers of the release before still call. The newest 5 attempts keep their logs
-- as they keep their stacks: every attempt that ends writes the whole history again. What is dropped is dropped before
-- the new entry is added: without a subquery, Postgres inlines the function, at a third of the cost.
CREATE FUNCTION windrow.remember(
    history jsonb, attempt smallint, worker text, leased_at timestamptz, ended_at timestamptz, outcome text, lease bigint,
    failure jsonb, log text
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
