-- Leases visible jobs to several takers. Takers with the same set of queues form a group of takers (this has nothing to
-- do with groups of jobs). A group of takers gets up to max_jobs jobs, ordered by priority, then by visible_at. Its
-- first taker gets the first of these jobs, up to the number that it asked for. The second taker gets the next jobs,
-- and so on. No queue is in two groups of takers. The scan of the ready index starts at each lane's floor, because the
-- index entries of claimed jobs come before it (shard/queue/claim_floor.py).
WITH source AS MATERIALIZED (
    SELECT s.grp, s.queue_id, s.turn, q.max_attempts
    FROM unnest(%(groups)s::integer[], %(queue_ids)s::bigint[], %(orgs)s::text[], %(queues)s::text[])
        WITH ORDINALITY AS s (grp, queue_id, org, queue, turn)
    -- OFFSET 0 makes Postgres find the queue by its id, never by a scan of all queues of the org.
    CROSS JOIN LATERAL (
        SELECT q.org, q.queue, {{gives_jobs(q)}} AS gives_jobs, q.max_attempts
        FROM windrow.queue q WHERE q.queue_id = s.queue_id OFFSET 0
    ) q
    -- A remembered queue_id may be wrong and name another queue, or a queue of another org. Then it gives no jobs
    -- (invariant I4).
    WHERE q.org = s.org AND q.queue = s.queue AND q.gives_jobs
), lanes AS MATERIALIZED (
    -- This CTE has one row for each group of takers: the maximum number of jobs that the group gets, and its lanes in
    -- the order in which they are scanned.
    SELECT
        source.grp,
        {{claim_room}} AS max_jobs,
        array_agg(source.queue_id ORDER BY p.priority, source.turn) AS queue_ids,
        array_agg(p.priority::smallint ORDER BY p.priority, source.turn) AS priorities,
        array_agg(
            timestamptz 'epoch' + (%(floors_us)s::bigint[])[(source.turn - 1) * 9 + p.priority] * interval '1 us'
            ORDER BY p.priority, source.turn
        ) AS floors
    FROM source
    CROSS JOIN generate_series(1, 9) AS p (priority)
    GROUP BY source.grp
    ORDER BY source.grp
), taken AS MATERIALIZED (
    -- This CTE is MATERIALIZED, and has no ORDER BY at this level. So Postgres scans the lanes lazily, one after
    -- another, and locks no more than max_jobs rows.
    SELECT (%(firsts)s::integer[])[g.grp] AS first, v.ctid, v.bytes, v.id, v.lease, v.worker
    FROM lanes g
    CROSS JOIN LATERAL (
        SELECT free.*
        FROM unnest(g.queue_ids, g.priorities, g.floors) AS lane (queue_id, priority, floor)
        CROSS JOIN LATERAL (
            SELECT
                j.ctid, j.id, j.lease, j.worker,
                octet_length(j.payload) + coalesce(octet_length(j.attributes::text), 0)
                    + coalesce(octet_length(j.checkpoint), 0) AS bytes
            FROM windrow.job j
            WHERE j.queue_id = lane.queue_id AND j.priority = lane.priority
                AND j.visible_at >= lane.floor AND j.visible_at <= now()
            ORDER BY j.visible_at
            LIMIT g.max_jobs
            FOR UPDATE SKIP LOCKED
        ) free
        LIMIT g.max_jobs
    ) v
), fitting AS (
    -- The jobs that fit into bytes_max, at least one. The other rows were locked, but are not changed.
    SELECT
        s.ctid, s.id, s.lease, s.worker,
        -- The number of the job, counted over all jobs that all takers want. Each taker has a range of these numbers;
        -- taker_firsts has the first number of each range.
        s.first + s.turn - min(s.turn) OVER (PARTITION BY s.first) AS place
    FROM (
        SELECT
            n.*,
            sum(n.bytes) OVER (ORDER BY n.turn ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before
        FROM (SELECT taken.*, row_number() OVER () AS turn FROM taken) n
    ) s
    WHERE coalesce(s.bytes_before, 0) < %(bytes_max)s
), chosen AS MATERIALIZED (
    SELECT
        array_agg(f.ctid ORDER BY f.ctid) AS ctids,
        array_agg(width_bucket(f.place::integer, %(taker_firsts)s::integer[]) ORDER BY f.ctid) AS takers,
        -- Leases that have expired; NULL if there are none.
        array_agg(f.id ORDER BY f.ctid) FILTER (WHERE f.lease IS NOT NULL) AS expired_ids,
        array_agg(f.lease ORDER BY f.ctid) FILTER (WHERE f.lease IS NOT NULL) AS expired_leases,
        array_agg(f.worker ORDER BY f.ctid) FILTER (WHERE f.lease IS NOT NULL) AS expired_workers
    FROM fitting f
)
UPDATE windrow.job AS j
SET
    (lease, worker, leased_at, attempt, visible_at) = (
        SELECT
            (%(leases)s::bigint[])[t.taker], (%(workers)s::text[])[t.taker],
            CASE WHEN t.taker > 0 THEN now() END, j.attempt + (t.taker > 0)::int,
            CASE
                WHEN t.taker = 0 THEN 'infinity'
                -- The lease ends after the window, or after the job's max_runtime if that is shorter (NULL: the job has
                -- no max_runtime).
                ELSE now() + least((%(windows_us)s::bigint[])[t.taker], j.max_runtime_us) * interval '1 us'
            END
        FROM (
            SELECT
                CASE
                    -- The job is a scheduled job of a group that has just become due. It is not leased, and from now on
                    -- waits for a slot.
                    WHEN j.group_key > '' AND j.group_slot IS NULL THEN 0
                    WHEN cardinality(%(leases)s::bigint[]) = 1 THEN 1
                    ELSE chosen.takers[width_bucket(j.ctid, chosen.ctids)]
                END AS taker
            FROM chosen
        ) t
    ),
    -- A lease that is still on the row has expired. Nothing else has recorded its end, so this claim records it.
    history = {{history_with_lost(j)}},
    log = NULL
-- Do not use a join. If the table was empty at the last vacuum, the planner expects it to be empty now, and would find
-- the rows of a join by a scan of the whole ready index.
WHERE j.ctid = ANY (ARRAY(SELECT unnest(chosen.ctids) FROM chosen))
RETURNING
    j.id::text, j.queue_id, j.priority, j.attempt,
    coalesce(j.max_attempts, (SELECT source.max_attempts FROM source WHERE source.queue_id = j.queue_id)) AS max_attempts,
    j.enqueued_at, j.run_at, j.lease, j.leased_at, j.visible_at AS deadline,
    coalesce(j.expires_at <= now(), false) AS expired, {{claimed_content(j)}}, j.checkpoint, j.scheduled_run, j.workflow_node,
    (SELECT c.expired_leases[array_position(c.expired_ids, j.id)] FROM chosen c) AS expired_lease,
    (SELECT c.expired_workers[array_position(c.expired_ids, j.id)] FROM chosen c) AS expired_worker
