-- Stores a batch of jobs, each job once, in the queues whose slots this shard owns. A job may come with a lease for a
-- waiting consumer, which then gets the job without a claim. Returns one row: the time, whether the times of the ids
-- are acceptable (ids_fit), the ids of the queues that were admitted, for each of these queues whether it gives jobs
-- and its max_attempts, the number of stored jobs, and the slots that the jobs got in their groups. If not all jobs
-- were stored, the row also has the ids of the stored jobs, and their queues. Postgres materializes each WITH query
-- that is used twice.
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
), slots AS (
    -- The slot that each job gets in its group. A job that is due and gets no slot waits: see
    -- functions/wait_for_slot.sql. take_group_slots runs once, before the first insert, and locks the groups.
    SELECT windrow.take_group_slots(%(ids)s, %(queue_ids)s, %(groups)s, %(run_at_us)s, %(delay_us)s)
), sent AS (
    -- A column that no job of the batch uses is an empty array, which unnest fills with NULLs. In this CTE, JSON is
    -- still text.
    SELECT
        n.*,
        -- The new run_at is never before now(), because claims do not look below the floor.
        greatest(now(), timestamptz 'epoch' + run_at_us * interval '1 us', now() + delay_us * interval '1 us') AS run_at,
        timestamptz 'epoch' + expires_at_us * interval '1 us' AS expires_at,
        now() + dedup_window_us * interval '1 us' AS until,
        (TABLE slots)[at] AS group_slot,
        -- The waiting consumer to which the job is leased at once. No consumer gets the job if its queue gives no jobs,
        -- or if it got no slot in its group.
        CASE WHEN gives_jobs AND (group_key IS NULL OR (TABLE slots)[at] > 0) THEN offered END AS taker
    FROM unnest(
        %(ids)s::uuid[], %(queue_ids)s::bigint[], %(priorities)s::smallint[], %(max_attempts)s::smallint[],
        %(run_at_us)s::bigint[], %(delay_us)s::bigint[], %(expires_at_us)s::bigint[], %(dedup_window_us)s::bigint[],
        {{new_job_arrays}}, %(takers)s::smallint[]
    ) WITH ORDINALITY n (
        id, queue_id, priority, max_attempts, run_at_us, delay_us, expires_at_us, dedup_window_us,
        {{job_content}}, offered, at
    )
    JOIN lane USING (queue_id)
    -- If one queue is not admitted, nothing is stored.
    WHERE (SELECT ids_fit FROM clock)
        AND (SELECT count(*) FROM lane) = cardinality(%(lane_ids)s)
), keys AS (
    -- Takes dedup keys that are new or whose windows are over, each for the first job that has the key. The rows are
    -- sorted by key, so that two batches cannot deadlock.
    INSERT INTO windrow.dedup AS d (queue_id, key, job_id, until)
    SELECT DISTINCT ON (queue_id, dedup_key) queue_id, dedup_key, id, until
    FROM sent
    WHERE dedup_key IS NOT NULL
    ORDER BY queue_id, dedup_key, at
    ON CONFLICT (queue_id, key) DO UPDATE SET job_id = excluded.job_id, until = excluded.until WHERE d.until <= now()
    RETURNING queue_id, job_id
), stored AS (
    INSERT INTO windrow.job (
        id, queue_id, priority, max_attempts, {{job_content}}, group_slot, run_at, visible_at, expires_at, lease,
        leased_at, worker, attempt
    )
    SELECT
        id, queue_id, coalesce(priority, 5), max_attempts, {{new_job_values}}, group_slot, run_at,
        coalesce(now() + (%(windows_us)s::bigint[])[taker] * interval '1 us', run_at), expires_at,
        (%(leases)s::bigint[])[taker],
        CASE WHEN taker > 0 THEN now() END, (%(workers)s::text[])[taker], (taker IS NOT NULL)::int
    FROM sent
    WHERE dedup_key IS NULL OR (queue_id, id) IN (TABLE keys)
    -- Jobs with a live key come first, sorted by key. All other jobs follow, sorted by id, as in enqueue_plain.sql. So
    -- two batches cannot deadlock, no matter which of the two statements stores them. If several jobs have the same
    -- live key, the first of them is stored.
    ORDER BY live_key, CASE WHEN live_key > '' THEN (queue_id, at) END, id
    -- Stores nothing for a job if a live job has the same id, or the same live key.
    ON CONFLICT DO NOTHING
    RETURNING id, queue_id, dedup_key
), counted AS (
    INSERT INTO windrow.tally (org_id, accepted)
    SELECT ({{org_of(s)}})::integer, count(*) FROM stored s GROUP BY 1
)
SELECT
    -- If no job was stored, do not read `slots`: reading it would take group slots, and a call that is refused must not
    -- wait for its groups.
    now(), ids_fit, l.*, n, CASE WHEN n > 0 THEN (TABLE slots) END,
    CASE WHEN part THEN ids::text[] END,
    CASE WHEN part THEN queues END,
    CASE
        -- A key was taken for a job that was not stored, because a live job has its id.
        WHEN keyed < (SELECT count(*) FROM keys) THEN windrow.refuse_unstored_keys()
        ELSE windrow.refuse_settled(ids, queues, since)
    END,
    -- If only some jobs were stored, the group slots of the other jobs are free. Give these slots to jobs that wait. If
    -- no job was stored, do nothing, because the groups may not be locked.
    CASE WHEN part AND n > 0 THEN windrow.fill_group_slots(%(queue_ids)s, %(groups)s) END
FROM clock, (
    SELECT array_agg(queue_id), array_agg(gives_jobs), array_agg(max_attempts)
    FROM lane
) l, (
    SELECT count(*), count(*) < %(jobs)s, count(dedup_key), array_agg(id), array_agg(queue_id) FROM stored
) s (n, part, keyed, ids, queues)
