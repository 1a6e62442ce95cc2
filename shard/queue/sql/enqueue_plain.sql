-- Stores a batch of jobs as enqueue.sql does, for jobs that have only an id, queue, kind, payload, priority and trace.
-- It admits ids and queues exactly as enqueue.sql does, and returns the same row. If a live job has one of the ids, the
-- statement fails with a unique violation and stores nothing. It has no ON CONFLICT, because without it each row needs
-- one WAL record less (docs/decisions/0038-plain-jobs-have-an-enqueue-of-their-own.md).
WITH clock AS (
    -- An id contains the time when it was made. If that time is older than the horizon, an earlier job with this id may
    -- have been deleted already. If that time is far in the future, an earlier job with this id may have finished
    -- before `since`, the time from which finished jobs are searched. `since` is two hours before the time of the
    -- oldest id. One hour is for ids from the future, whose jobs may have finished before the time in their ids. One
    -- hour is for clocks that differ, because the job may have finished by another server's clock.
    SELECT
        to_timestamp(%(oldest_ms)s / 1e3) >= now() - %(horizon_us)s * interval '1 us'
            AND to_timestamp(%(newest_ms)s / 1e3) <= now() + interval '1 hour' AS ids_fit,
        least(to_timestamp(%(oldest_ms)s / 1e3), now()) - interval '2 hours' AS since
), lane AS (
    -- A queue is admitted only if the remembered queue_id still names this org's queue. It is not admitted if its slot
    -- has moved away, or if its slot has arrived by a move that the caller does not know (invariant I6), because then
    -- the caller has not asked the slot's former owner for the ids. OFFSET 0 makes Postgres find queues and slots by
    -- their numbers, never by a scan of all of them.
    SELECT l.queue_id, gives_jobs, max_attempts
    FROM unnest(%(lane_ids)s::bigint[], %(lane_orgs)s::text[], %(lane_queues)s::text[], %(lane_epochs)s::bigint[])
        AS l (queue_id, org, queue, epoch),
    LATERAL (
        SELECT *, {{gives_jobs(q)}} AS gives_jobs FROM windrow.queue q WHERE queue_id = l.queue_id OFFSET 0
    ) q,
    LATERAL (SELECT state, epoch FROM windrow.owned_slot WHERE slot = q.slot OFFSET 0) s
    WHERE q.org = l.org AND q.queue = l.queue AND s.state = 'owned' AND s.epoch <= l.epoch
), stored AS (
    INSERT INTO windrow.job (
        id, queue_id, priority, kind, payload, trace, run_at, visible_at, lease, leased_at, worker, attempt
    )
    SELECT
        n.id, n.queue_id, coalesce(n.priority, 5), n.kind, n.payload, n.trace, now(),
        coalesce(now() + (%(windows_us)s::bigint[])[n.taker] * interval '1 us', now()),
        (%(leases)s::bigint[])[n.taker], CASE WHEN n.taker IS NOT NULL THEN now() END,
        (%(workers)s::text[])[n.taker], (n.taker IS NOT NULL)::int
    FROM (
        SELECT
            n.id, n.queue_id, n.priority, n.kind, n.payload, n.trace,
            -- The waiting consumer to which the job is leased at once, if the queue gives jobs.
            CASE WHEN lane.gives_jobs THEN n.taker END AS taker
        -- A column that no job of the batch uses is an empty array, which unnest fills with NULLs.
        FROM unnest(
            %(ids)s::uuid[], %(queue_ids)s::bigint[], %(priorities)s::smallint[], %(kinds)s::text[],
            %(payloads)b::bytea[], %(traces)s::text[], %(takers)s::smallint[]
        ) AS n (id, queue_id, priority, kind, payload, trace, taker)
        JOIN lane USING (queue_id)
        -- If one queue is not admitted, nothing is stored.
        WHERE (SELECT clock.ids_fit FROM clock)
            AND (SELECT count(*) FROM lane) = cardinality(%(lane_ids)s::bigint[])
        -- The rows are sorted by id, as in enqueue.sql, so that two batches cannot deadlock, no matter which of the two
        -- statements stores them.
        ORDER BY n.id
    ) n
    RETURNING queue_id
), counted AS (
    INSERT INTO windrow.tally (org_id, accepted)
    SELECT ({{org_of(s)}})::integer, count(*) FROM stored s GROUP BY 1
)
SELECT
    now(), clock.ids_fit, l.*, s.stored, NULL::smallint[], NULL::text[], NULL::bigint[],
    CASE
        WHEN s.stored > 0 THEN windrow.refuse_settled(%(ids)s::uuid[], %(queue_ids)s::bigint[], clock.since)
    END,
    NULL
FROM clock
CROSS JOIN (
    SELECT array_agg(lane.queue_id), array_agg(lane.gives_jobs), array_agg(lane.max_attempts)
    FROM lane
) l
CROSS JOIN (SELECT count(*) AS stored FROM stored) s
