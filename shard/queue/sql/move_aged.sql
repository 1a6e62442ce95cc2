-- Moves jobs of these queues that have aged to priority 1. A job has aged if it became visible at least p - 1 times the
-- queue's ageing_seconds ago, where p is its priority. Moves at most jobs_max jobs of each priority of a queue. Begins
-- at each lane's floor, as a claim does.
WITH aged AS MATERIALIZED (
    -- MATERIALIZED makes Postgres run this CTE once, so that it locks no more rows than it moves.
    SELECT v.ctid
    FROM unnest(%(queue_ids)s::bigint[]) WITH ORDINALITY AS s (queue_id, turn)
    -- OFFSET 0 makes Postgres find the queue by its id, as in claim.sql.
    CROSS JOIN LATERAL (
        SELECT q.ageing_seconds
        FROM windrow.queue q
        WHERE q.queue_id = s.queue_id AND q.ageing_seconds IS NOT NULL AND {{gives_jobs(q)}}
        OFFSET 0
    ) q
    CROSS JOIN generate_series(2, 9) AS p (priority)
    CROSS JOIN LATERAL (
        SELECT j.ctid
        FROM windrow.job j
        WHERE j.queue_id = s.queue_id AND j.priority = p.priority::smallint
            AND j.visible_at
                >= timestamptz 'epoch' + (%(floors_us)s::bigint[])[(s.turn - 1) * 9 + p.priority] * interval '1 us'
            AND j.visible_at <= now() - (p.priority - 1) * q.ageing_seconds * interval '1 s'
        ORDER BY j.visible_at
        LIMIT %(jobs_max)s
        FOR UPDATE SKIP LOCKED
    ) v
)
UPDATE windrow.job AS j
SET
    priority = 1,
    -- The new visible_at is not earlier than now(), because claims do not look below the floor.
    visible_at = now(),
    -- If a lease has expired and no claim has noticed it, record the end of the lease now.
    history = {{history_with_lost(j)}},
    lease = NULL, leased_at = NULL, worker = NULL, log = NULL
WHERE j.ctid = ANY (ARRAY(SELECT aged.ctid FROM aged))
