-- Advances schedules whose runs are stored. `runs_us`: the instant of the latest run that was stored now, whatever its
-- cause. `buffered`: the maximum number of buffered runs. If it is not 0, this statement counts the buffered runs,
-- because there may be fewer: a run that was to be buffered was not stored if its instant had a run before.
UPDATE windrow.schedule s
SET
    next_at = timestamptz 'epoch' + n.next_us * interval '1 us',
    wake_at = CASE WHEN s.paused_at IS NULL THEN timestamptz 'epoch' + n.wake_us * interval '1 us' END,
    last_at = coalesce(timestamptz 'epoch' + n.last_us * interval '1 us', s.last_at),
    -- The job of the run at the instant in `runs_us`. If that instant had a run before, it is the job of the earlier
    -- run.
    last_job = coalesce(
        (
            SELECT r.job_id
            FROM windrow.schedule_run r
            WHERE r.schedule_id = s.id AND r.at = timestamptz 'epoch' + n.run_us * interval '1 us'
        ),
        s.last_job
    ),
    buffered = CASE WHEN n.buffered > 0 THEN
        (SELECT count(*) FROM windrow.schedule_run r WHERE r.schedule_id = s.id AND r.outcome = 'buffered')
    ELSE 0 END,
    decided = s.decided + n.decided
FROM unnest(
    %(schedules)s::uuid[], %(nexts_us)s::bigint[], %(wakes_us)s::bigint[], %(lasts_us)s::bigint[], %(runs_us)s::bigint[],
    %(buffered)s::bigint[], %(decided)s::bigint[]
) AS n (id, next_us, wake_us, last_us, run_us, buffered, decided)
WHERE s.id = n.id
