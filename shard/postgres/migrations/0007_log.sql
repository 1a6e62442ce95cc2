-- What the attempt under way has logged, as the newest extend reported it: a text of lines, the oldest first. NULL if it
-- has logged nothing. When the lease ends, the text goes into the attempt's entry in `history`, so the other tables of
-- jobs have no such column.
ALTER TABLE windrow.job ADD COLUMN log text;

-- As windrow.remember without `log`, which routers of the release before still call. The newest 5 attempts keep their logs
-- as they keep their stacks: every attempt that ends writes the whole history again.
CREATE FUNCTION windrow.remember(
    history jsonb, attempt smallint, worker text, leased_at timestamptz, ended_at timestamptz, outcome text, lease bigint,
    failure jsonb, log text
) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN jsonb_array_length(longer.history) > 50 THEN longer.history - 0 ELSE longer.history END
        #- '{-6,failure,stack}' #- '{-6,log}'
    FROM (
        SELECT coalesce(history, '[]') || jsonb_build_array(jsonb_strip_nulls(jsonb_build_object(
            'attempt', attempt, 'worker', worker, 'outcome', outcome, 'lease', lease::text, 'failure', failure, 'log', log,
            'leased_at_us', (extract(epoch FROM leased_at) * 1000000)::bigint,
            'ended_at_us', (extract(epoch FROM ended_at) * 1000000)::bigint
        ))) AS history
    ) longer
$$;
