-- Stores decided runs of schedules, each run once, and the jobs of the runs with the outcome `stored`. Returns the
-- queues that got jobs, and the number of jobs. If a queue does not exist, also returns the org and the name of the
-- queue; then the caller must roll back the transaction. The caller must have locked the schedules. `stored_ids` has
-- the ids of the jobs in ascending order. `scheduled_runs` has the same order.
WITH run AS (
    INSERT INTO windrow.schedule_run AS r (schedule_id, at, through, cause, outcome, skipped_for, job_id, request)
    SELECT
        d.schedule_id, timestamptz 'epoch' + d.at_us * interval '1 us', timestamptz 'epoch' + d.through_us * interval '1 us',
        d.cause, d.outcome, d.skipped_for, d.job_id, d.request
    FROM unnest(
        %(schedules)s::uuid[], %(ats_us)s::bigint[], %(throughs_us)s::bigint[], %(causes)s::text[], %(outcomes)s::text[],
        %(skipped_for)s::text[], %(job_ids)s::uuid[], %(requests)s::uuid[]
    ) AS d (schedule_id, at_us, through_us, cause, outcome, skipped_for, job_id, request)
    -- Changes an existing run in two cases only: a buffered run is stored now, or a backfill decides again about a run
    -- that was skipped for another reason than an overlap. In all other cases, an instant that has a run keeps that
    -- run.
    ON CONFLICT (schedule_id, at) DO UPDATE SET
        cause = excluded.cause, outcome = excluded.outcome, through = excluded.through, skipped_for = excluded.skipped_for,
        job_id = excluded.job_id, decided_at = now()
        WHERE r.outcome = 'buffered' AND excluded.outcome = 'stored'
            OR r.skipped_for <> 'overlap' AND excluded.cause = 'backfill'
    RETURNING r.schedule_id, r.job_id
), placed AS (
    -- Finds the queues by their names. A router must not name the queues by ids that it remembers: such an id may
    -- belong to an erased org or, after a restore from a backup, to another org (invariant I4).
    SELECT run.schedule_id, run.job_id, o.org, s.queue, q.queue_id
    FROM run
    JOIN windrow.schedule s ON s.id = run.schedule_id
    CROSS JOIN LATERAL (SELECT o.org FROM windrow.org o WHERE o.org_id = s.org_id OFFSET 0) o
    LEFT JOIN LATERAL (
        SELECT q.queue_id FROM windrow.queue q WHERE q.org = o.org AND q.queue = s.queue OFFSET 0
    ) q ON true
    WHERE run.job_id IS NOT NULL
), stored AS (
    INSERT INTO windrow.job (
        id, queue_id, priority, max_attempts, {{job_content}}, run_at, visible_at, scheduled_run
    )
    SELECT
        p.job_id, p.queue_id, coalesce(s.priority, 5), s.max_attempts, {{template_content(s)}},
        now(), now(), (%(scheduled_runs)s::text[])[place.at]
    FROM placed p
    CROSS JOIN LATERAL (SELECT width_bucket(p.job_id, %(stored_ids)s::uuid[]) AS at) place
    JOIN windrow.schedule s ON s.id = p.schedule_id
    WHERE p.queue_id IS NOT NULL
    -- The rows are sorted by id, as in enqueue.sql.
    ORDER BY p.job_id
    RETURNING queue_id
), counted AS (
    INSERT INTO windrow.tally (org_id, accepted)
    SELECT ({{org_of(s)}})::integer, count(*) FROM stored s GROUP BY 1
), relisted AS (
    -- A deleted queue is listed again as soon as it has jobs.
    UPDATE windrow.queue q SET listed = true
    FROM (SELECT DISTINCT stored.queue_id FROM stored) s
    WHERE q.queue_id = s.queue_id AND NOT q.listed
)
SELECT
    array_agg(DISTINCT stored.queue_id) AS queue_ids, count(*) AS jobs,
    (SELECT ARRAY[p.org, p.queue] FROM placed p WHERE p.queue_id IS NULL LIMIT 1) AS unknown_queue
FROM stored
