-- Stores the decided runs of schedules, each once, and the jobs of those that are to run now; and advances the schedules.
-- Returns the queues that got jobs, and how many jobs. The caller has locked the schedules.
WITH decided AS (
    SELECT n.*
    FROM unnest(
        %(run_schedules)s::uuid[], %(ats_us)s::bigint[], %(throughs_us)s::bigint[], %(causes)s::text[],
        %(outcomes)s::text[], %(skipped_for)s::text[], %(job_ids)s::uuid[], %(requests)s::uuid[],
        %(queue_ids)s::bigint[], %(scheduled_runs)s::text[]
    ) AS n (
        schedule_id, at_us, through_us, cause, outcome, skipped_for, job_id, request, queue_id, scheduled_run
    )
), run AS (
    INSERT INTO windrow.schedule_run AS r (schedule_id, at, through, cause, outcome, skipped_for, job_id, request)
    SELECT
        d.schedule_id, timestamptz 'epoch' + d.at_us * interval '1 us', timestamptz 'epoch' + d.through_us * interval '1 us',
        d.cause, d.outcome, d.skipped_for, d.job_id, d.request
    FROM decided d
    -- A run that has waited is stored now. Any other instant that has a run keeps it.
    ON CONFLICT (schedule_id, at) DO UPDATE SET outcome = 'stored', job_id = excluded.job_id, decided_at = now()
        WHERE r.outcome = 'buffered' AND excluded.outcome = 'stored'
    RETURNING r.schedule_id, r.at, r.outcome, r.job_id
), stored AS (
    INSERT INTO windrow.job (
        id, queue_id, priority, max_attempts, {{job_content}}, run_at, visible_at, scheduled_run
    )
    SELECT
        run.job_id, d.queue_id, coalesce(s.priority, 5), s.max_attempts, {{template_content(s)}}, now(), now(),
        d.scheduled_run
    FROM run
    JOIN decided d ON d.job_id = run.job_id
    JOIN windrow.schedule s ON s.id = run.schedule_id
    WHERE run.outcome = 'stored'
    -- As in enqueue.sql.
    ORDER BY run.job_id
    RETURNING queue_id
), counted AS (
    INSERT INTO windrow.tally (org_id, accepted)
    SELECT ({{org_of(s)}})::integer, count(*) FROM stored s GROUP BY 1
), relisted AS (
    -- A deleted queue is listed again as soon as it has jobs.
    UPDATE windrow.queue q SET listed = true FROM stored s WHERE q.queue_id = s.queue_id AND NOT q.listed
), advanced AS (
    UPDATE windrow.schedule s
    SET
        next_at = timestamptz 'epoch' + n.next_us * interval '1 us',
        wake_at = CASE WHEN s.paused_at IS NULL THEN timestamptz 'epoch' + n.wake_us * interval '1 us' END,
        last_at = coalesce(timestamptz 'epoch' + n.last_us * interval '1 us', s.last_at),
        last_job = coalesce(
            (
                SELECT run.job_id FROM run
                WHERE run.schedule_id = s.id AND run.outcome = 'stored'
                ORDER BY run.at DESC
                LIMIT 1
            ),
            s.last_job
        ),
        buffered = n.buffered,
        decided = s.decided + n.decided
    FROM unnest(
        %(schedules)s::uuid[], %(nexts_us)s::bigint[], %(wakes_us)s::bigint[], %(lasts_us)s::bigint[],
        %(buffered)s::bigint[], %(decided)s::bigint[]
    ) AS n (id, next_us, wake_us, last_us, buffered, decided)
    WHERE s.id = n.id
)
SELECT array_agg(DISTINCT stored.queue_id) AS queue_ids, count(*) AS jobs FROM stored
