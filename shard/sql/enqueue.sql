-- Stores a batch of jobs, each once, in the queues that this shard may take jobs for.
-- A job may come with a lease: a consumer waits for it, and has it without a claim.
-- One row: whether the ids' times fit, admitted (the queue ids that were accepted), how many jobs were stored, and which,
-- in which queues, if fewer than sent.
WITH clock AS MATERIALIZED (
    -- An id tells when it was made. Older than the dedup horizon, its first copy may have been archived and forgotten; far
    -- in the future, the copies finished before then would be overlooked. The second hour is room for clocks to differ: a job may
    -- finish by another one than it was accepted by.
    SELECT
        to_timestamp(%(oldest_ms)s / 1000.0) >= now() - %(horizon_us)s * interval '1 us'
            AND to_timestamp(%(newest_ms)s / 1000.0) <= now() + interval '1 hour' AS ids_fit,
        least(to_timestamp(%(oldest_ms)s / 1000.0), now()) - interval '2 hours' AS since
), lane AS MATERIALIZED (
    -- A remembered queue_id proves itself: it must still name this org's queue. A slot that moved away admits nothing, nor
    -- does one that came by a move of which the caller does not know (I6): whom to ask for ids before, it cannot know.
    -- OFFSET 0 fences: by the numbers alone, never by a walk through all queues or slots.
    SELECT l.queue_id, q.paused, q.max_attempts
    FROM unnest(%(lane_ids)s::bigint[], %(lane_orgs)s::text[], %(lane_queues)s::text[], %(lane_epochs)s::bigint[])
        AS l (queue_id, org, queue, epoch)
    CROSS JOIN LATERAL (SELECT q.org, q.queue, q.slot, q.paused, q.max_attempts FROM windrow.queue q WHERE q.queue_id = l.queue_id OFFSET 0) q
    CROSS JOIN LATERAL (SELECT s.state, s.epoch FROM windrow.owned_slot s WHERE s.slot = q.slot OFFSET 0) s
    WHERE q.org = l.org AND q.queue = l.queue AND s.state = 'owned' AND s.epoch <= l.epoch
), incoming AS MATERIALIZED (
    -- unnest pads: a column that no job of the batch uses is sent as an empty array.
    SELECT
        n.id, n.queue_id, n.kind, n.payload, n.priority, n.max_attempts, n.dedup_key, n.trace, n.position,
        n.attributes::jsonb AS attributes, n.retry::jsonb AS retry,
        -- Never before now(): what a floor has passed stays passed.
        greatest(now(), coalesce(timestamptz 'epoch' + n.run_at_us * interval '1 us', now() + n.delay_us * interval '1 us')) AS run_at,
        timestamptz 'epoch' + n.expires_at_us * interval '1 us' AS expires_at,
        now() + n.dedup_window_us * interval '1 us' AS dedup_until,
        -- Leased from the start: to a consumer that waits for it.
        CASE WHEN NOT lane.paused THEN n.taker END AS taker
    FROM unnest(
        %(ids)s::uuid[], %(queue_ids)s::bigint[], %(kinds)s::text[], %(payloads)b::bytea[], %(priorities)s::smallint[],
        %(attributes)s::text[], %(run_at_us)s::bigint[], %(delay_us)s::bigint[], %(expires_at_us)s::bigint[],
        %(max_attempts)s::smallint[], %(retries)s::text[], %(dedup_keys)s::text[], %(dedup_window_us)s::bigint[],
        %(traces)s::text[], %(takers)s::smallint[]
    ) WITH ORDINALITY AS n (
        id, queue_id, kind, payload, priority, attributes, run_at_us, delay_us, expires_at_us,
        max_attempts, retry, dedup_key, dedup_window_us, trace, taker, position
    )
    JOIN lane ON lane.queue_id = n.queue_id
    -- All or none: one queue that is not admitted, and nothing is stored.
    WHERE (SELECT clock.ids_fit FROM clock)
        AND (SELECT count(*) FROM lane) = cardinality(%(lane_ids)s::bigint[])
), reserved AS (
    -- Takes keys that are new or whose windows are over, each for the first job that names it. Sorted by key: two batches
    -- that take their keys in one order cannot deadlock.
    INSERT INTO windrow.dedup AS d (queue_id, key, job_id, until)
    SELECT DISTINCT ON (i.queue_id, i.dedup_key) i.queue_id, i.dedup_key, i.id, i.dedup_until
    FROM incoming i
    WHERE i.dedup_key IS NOT NULL
    ORDER BY i.queue_id, i.dedup_key, i.position
    ON CONFLICT (queue_id, key) DO UPDATE SET job_id = excluded.job_id, until = excluded.until WHERE d.until <= now()
    RETURNING d.queue_id, d.job_id
), stored AS (
    INSERT INTO windrow.job (
        id, queue_id, kind, payload, priority, attributes, run_at, visible_at, expires_at, max_attempts, retry,
        dedup_key, trace, lease, leased_at, worker, attempt
    )
    SELECT
        i.id, i.queue_id, i.kind, i.payload, coalesce(i.priority, 5), i.attributes, i.run_at,
        coalesce(now() + (%(windows_us)s::bigint[])[i.taker] * interval '1 us', i.run_at), i.expires_at,
        i.max_attempts, i.retry, i.dedup_key, i.trace, (%(leases)s::bigint[])[i.taker],
        CASE WHEN i.taker IS NOT NULL THEN now() END, (%(workers)s::text[])[i.taker], (i.taker IS NOT NULL)::integer
    FROM incoming i
    WHERE i.dedup_key IS NULL OR (i.queue_id, i.id) IN (SELECT r.queue_id, r.job_id FROM reserved r)
    ORDER BY i.id
    ON CONFLICT DO NOTHING
    RETURNING id, queue_id, dedup_key
), counted AS (
    INSERT INTO windrow.tally (org_id, accepted)
    SELECT (s.queue_id & 4294967295)::integer, count(*) FROM stored s GROUP BY 1
)
SELECT
    now() AS now, clock.ids_fit, l.admitted, l.paused, l.max_attempts, s.stored,
    CASE WHEN s.stored < %(jobs)s THEN s.ids::text[] END AS stored_ids,
    CASE WHEN s.stored < %(jobs)s THEN s.queue_ids END AS stored_in,
    CASE
        -- A key was taken for a job that was not stored, because its id is live already.
        WHEN s.keyed < (SELECT count(*) FROM reserved) THEN windrow.refuse_unstored_keys()
        ELSE windrow.refuse_settled(s.ids, s.queue_ids, clock.since)
    END
FROM clock
CROSS JOIN (
    SELECT array_agg(lane.queue_id) AS admitted, array_agg(lane.paused) AS paused, array_agg(lane.max_attempts) AS max_attempts
    FROM lane
) l
CROSS JOIN (
    SELECT count(*) AS stored, count(stored.dedup_key) AS keyed, array_agg(stored.id) AS ids, array_agg(stored.queue_id) AS queue_ids
    FROM stored
) s
