-- Leases visible jobs to several takers: each group (one set of queues) gets up to its max_jobs, by priority, then by when
-- they became visible; its takers share them in turn. The ready index is walked from each lane's floor, not from the
-- beginning of time: there lie the dead versions of what has been claimed (shard/floor.py). No queue is in two groups.
WITH source AS MATERIALIZED (
    SELECT s.grp, s.queue_id, s.turn, q.max_attempts
    FROM unnest(%(groups)s::integer[], %(queue_ids)s::bigint[], %(orgs)s::text[], %(queues)s::text[])
        WITH ORDINALITY AS s (grp, queue_id, org, queue, turn)
    -- OFFSET 0 fence: by its number alone, never by a walk through all queues of the org.
    CROSS JOIN LATERAL (
        SELECT q.org, q.queue, q.paused, q.max_attempts FROM windrow.queue q WHERE q.queue_id = s.queue_id OFFSET 0
    ) q
    -- A remembered queue_id that is another org's (I4), or another queue's, gives nothing.
    WHERE q.org = s.org AND q.queue = s.queue AND NOT q.paused
), lane AS MATERIALIZED (
    SELECT
        source.grp, source.queue_id, p.priority::smallint AS priority,
        timestamptz 'epoch' + (%(floors_us)s::bigint[])[(source.turn - 1) * 9 + p.priority] * interval '1 us' AS floor
    FROM source
    CROSS JOIN generate_series(1, 9) AS p (priority)
    ORDER BY source.grp, p.priority, source.turn
), taken AS MATERIALIZED (
    -- MATERIALIZED fence, and no ORDER BY out here: lanes are entered in turn, lazily, so that no more than max_jobs rows
    -- are ever locked.
    SELECT g.first, visible.ctid, visible.bytes
    FROM unnest(%(max_jobs)s::integer[], %(firsts)s::integer[]) WITH ORDINALITY AS g (max_jobs, first, grp)
    CROSS JOIN LATERAL (
        SELECT v.ctid, v.bytes
        FROM lane
        CROSS JOIN LATERAL (
            SELECT j.ctid, octet_length(j.payload) + coalesce(octet_length(j.attributes::text), 0) AS bytes
            FROM windrow.job j
            WHERE j.queue_id = lane.queue_id AND j.priority = lane.priority
                AND j.visible_at >= lane.floor AND j.visible_at <= now()
            ORDER BY j.visible_at
            LIMIT g.max_jobs
            FOR UPDATE SKIP LOCKED
        ) v
        WHERE lane.grp = g.grp
        LIMIT g.max_jobs
    ) visible
), fitting AS (
    -- What the answers have room for, one job at least. The rest was locked, is not leased, and so is left as it was.
    SELECT
        sized.ctid,
        -- Counted through all groups' wishes: it tells the taker.
        sized.first + sized.turn - min(sized.turn) OVER (PARTITION BY sized.first) AS place
    FROM (
        SELECT
            numbered.*,
            sum(numbered.bytes) OVER (ORDER BY numbered.turn ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before
        FROM (SELECT taken.*, row_number() OVER () AS turn FROM taken) numbered
    ) sized
    WHERE coalesce(sized.bytes_before, 0) < %(bytes_max)s
), chosen AS MATERIALIZED (
    SELECT
        array_agg(fitting.ctid ORDER BY fitting.ctid) AS ctids,
        array_agg(width_bucket(fitting.place::integer, %(taker_firsts)s::integer[]) ORDER BY fitting.ctid) AS takers
    FROM fitting
)
UPDATE windrow.job AS j
SET
    (lease, worker, visible_at) = (
        SELECT
            (%(leases)s::bigint[])[t.taker], (%(workers)s::text[])[t.taker],
            now() + (%(windows_us)s::bigint[])[t.taker] * interval '1 us'
        FROM (
            SELECT
                CASE
                    WHEN cardinality(%(leases)s::bigint[]) = 1 THEN 1
                    ELSE chosen.takers[width_bucket(j.ctid, chosen.ctids)]
                END AS taker
            FROM chosen
        ) t
    ),
    leased_at = now(),
    attempt = j.attempt + 1,
    history = CASE
        -- A lease that is still on the row has expired unseen: this claim writes down its end.
        WHEN j.lease IS NOT NULL THEN windrow.remember(j.history, j.attempt, j.worker, j.leased_at, j.visible_at, 'expired', j.lease, NULL)
        ELSE j.history
    END
-- No join here: where the planner believes the table to be empty, because it was when last vacuumed, it would find the
-- rows by walking the whole ready index in the join's order.
WHERE j.ctid = ANY (ARRAY(SELECT unnest(chosen.ctids) FROM chosen))
RETURNING
    j.id::text, j.queue_id, j.kind, j.payload, j.attributes::text, j.priority, j.attempt,
    coalesce(j.max_attempts, (SELECT source.max_attempts FROM source WHERE source.queue_id = j.queue_id)) AS max_attempts,
    j.enqueued_at, j.run_at, j.trace, j.lease, j.leased_at, j.visible_at AS deadline,
    coalesce(j.expires_at <= now(), false) AS expired
