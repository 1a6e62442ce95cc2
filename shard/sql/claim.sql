-- Leases up to max_jobs visible jobs, by priority, then by when they became visible. The ready index is walked from each
-- lane's floor, not from the beginning of time: there lie the dead versions of what has been claimed (shard/floor.py).
WITH lane AS MATERIALIZED (
    SELECT l.queue_id, l.priority, l.floor
    FROM unnest(%(lane_ids)s::bigint[], %(lane_priorities)s::smallint[], %(lane_floors_us)s::bigint[])
        WITH ORDINALITY AS raw (queue_id, priority, floor_us, turn)
    CROSS JOIN LATERAL (SELECT raw.queue_id, raw.priority, timestamptz 'epoch' + raw.floor_us * interval '1 us' AS floor) l
    -- OFFSET 0 fence: by its number alone, never by a walk through all queues of the org.
    CROSS JOIN LATERAL (SELECT q.org, q.queue, q.paused FROM windrow.queue q WHERE q.queue_id = l.queue_id OFFSET 0) q
    -- A remembered queue_id that is another org's (I4), or a queue's that was not asked for, gives nothing.
    WHERE q.org = %(org)s AND q.queue = ANY (%(queues)s::text[]) AND NOT q.paused
    ORDER BY raw.turn
), taken AS MATERIALIZED (
    -- MATERIALIZED fence, and no ORDER BY out here: lanes are entered in turn, lazily, so that no more than max_jobs rows
    -- are ever locked.
    SELECT visible.ctid, visible.bytes
    FROM lane
    CROSS JOIN LATERAL (
        SELECT j.ctid, octet_length(j.payload) + coalesce(octet_length(j.attributes::text), 0) AS bytes
        FROM windrow.job j
        WHERE j.queue_id = lane.queue_id AND j.priority = lane.priority
            AND j.visible_at >= lane.floor AND j.visible_at <= now()
        ORDER BY j.visible_at
        LIMIT %(max_jobs)s
        FOR UPDATE SKIP LOCKED
    ) visible
    LIMIT %(max_jobs)s
), fitting AS (
    -- What the answer has room for, one job at least. The rest was locked, is not leased, and so is left as it was.
    SELECT sized.ctid
    FROM (
        SELECT taken.ctid, sum(taken.bytes) OVER (ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before
        FROM taken
    ) sized
    WHERE coalesce(sized.bytes_before, 0) < %(bytes_max)s
)
UPDATE windrow.job AS j
SET
    lease = %(lease)s,
    leased_at = now(),
    visible_at = now() + %(window_us)s * interval '1 us',
    worker = %(worker)s,
    attempt = j.attempt + 1,
    history = CASE
        -- A lease that is still on the row has expired unseen: this claim writes down its end.
        WHEN j.lease IS NOT NULL THEN windrow.remember(j.history, j.attempt, j.worker, j.leased_at, j.visible_at, 'expired', j.lease, NULL)
        ELSE j.history
    END
-- No join here: where the planner believes the table to be empty, because it was when last vacuumed, it would find the
-- rows by walking the whole ready index in the join's order.
WHERE j.ctid = ANY (ARRAY(SELECT fitting.ctid FROM fitting))
RETURNING
    j.id::text, (SELECT q.queue FROM windrow.queue q WHERE q.queue_id = j.queue_id) AS queue,
    j.kind, j.payload, j.attributes::text, j.priority, j.attempt,
    coalesce(j.max_attempts, (SELECT q.max_attempts FROM windrow.queue q WHERE q.queue_id = j.queue_id)) AS max_attempts,
    j.enqueued_at, j.run_at, j.trace,
    j.queue_id, j.leased_at, j.visible_at AS deadline, coalesce(j.expires_at <= now(), false) AS expired
