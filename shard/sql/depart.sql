-- Jobs and dead jobs of these slots that nobody holds go aside, to be taken by another shard; each slot's under the number
-- that its chunk is to have. The slots come in ascending order. Up to so many rows, and the row that fills so many bytes
-- is the last. Answers how many, by slot.
WITH slot AS MATERIALIZED (
    -- Locked as it is come to: whoever else is here with the same number waits, and then has the wrong one.
    SELECT o.slot
    FROM unnest(%(slots)s::smallint[], %(chunks)s::integer[]) AS n (slot, chunk)
    CROSS JOIN LATERAL (
        SELECT o.slot
        FROM windrow.owned_slot o
        WHERE o.slot = n.slot AND o.state = 'draining' AND o.epoch = %(epoch)s AND o.chunk = n.chunk - 1
        FOR UPDATE
    ) o
), live AS MATERIALIZED (
    -- No ORDER BY out here: queues are entered in turn, lazily, so that no more rows are ever locked than may leave.
    SELECT free.ctid, free.bytes
    FROM slot
    -- OFFSET 0 fences: see read_queues.sql.
    CROSS JOIN LATERAL (SELECT o.org FROM windrow.org o WHERE o.slot = slot.slot OFFSET 0) o
    CROSS JOIN LATERAL (SELECT q.queue_id FROM windrow.queue q WHERE q.org = o.org OFFSET 0) q
    CROSS JOIN LATERAL (
        SELECT
            j.ctid,
            octet_length(j.payload) + coalesce(octet_length(j.attributes::text), 0)
                + coalesce(octet_length(j.history::text), 0) AS bytes
        FROM windrow.job j
        WHERE j.queue_id = q.queue_id AND (j.lease IS NULL OR j.visible_at <= now())
        LIMIT %(rows)s
        FOR UPDATE SKIP LOCKED
    ) free
    LIMIT %(rows)s
), aside AS MATERIALIZED (
    SELECT free.ctid, free.bytes
    FROM slot
    CROSS JOIN LATERAL (SELECT o.org FROM windrow.org o WHERE o.slot = slot.slot OFFSET 0) o
    CROSS JOIN LATERAL (SELECT q.queue_id FROM windrow.queue q WHERE q.org = o.org OFFSET 0) q
    CROSS JOIN LATERAL (
        SELECT
            d.ctid,
            octet_length(d.payload) + coalesce(octet_length(d.attributes::text), 0)
                + coalesce(octet_length(d.history::text), 0) AS bytes
        FROM windrow.dead d
        WHERE d.queue_id = q.queue_id
        LIMIT %(rows)s
        FOR UPDATE SKIP LOCKED
    ) free
    LIMIT %(rows)s - (SELECT count(*) FROM live)
), fitting AS MATERIALIZED (
    -- What is beyond was locked, does not leave, and so is left as it was.
    SELECT sized.is_dead, sized.ctid
    FROM (
        SELECT
            found.*,
            sum(found.bytes) OVER (ORDER BY found.is_dead ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before
        FROM (
            SELECT false AS is_dead, live.* FROM live UNION ALL SELECT true, aside.* FROM aside
        ) found
    ) sized
    WHERE coalesce(sized.bytes_before, 0) < %(bytes)s
), gone AS (
    DELETE FROM windrow.job j
    WHERE j.ctid = ANY (ARRAY(SELECT fitting.ctid FROM fitting WHERE NOT fitting.is_dead))
    RETURNING j.*
), taken_up AS (
    DELETE FROM windrow.dead d
    WHERE d.ctid = ANY (ARRAY(SELECT fitting.ctid FROM fitting WHERE fitting.is_dead))
    RETURNING d.*
), departed AS (
    INSERT INTO windrow.departing (
        slot, epoch, chunk, id, queue_id, enqueued_at, run_at, finished_at, lease, leased_at, expires_at, priority,
        attempt, max_attempts, kind, payload, attributes, retry, dedup_key, trace, worker, history, reason
    )
    SELECT
        o.slot, %(epoch)s, (%(chunks)s::integer[])[width_bucket(o.slot, %(slots)s::smallint[])], leaving.*
    FROM (
        SELECT
            g.id, g.queue_id, g.enqueued_at,
            -- Where a lease has ended unseen, that was when; it is written down here, by the clock that ended it.
            g.visible_at AS run_at, NULL::timestamptz AS finished_at, NULL::bigint AS lease,
            NULL::timestamptz AS leased_at, g.expires_at, g.priority, g.attempt, g.max_attempts, g.kind, g.payload,
            g.attributes, g.retry, g.dedup_key, g.trace, NULL::text AS worker,
            CASE
                WHEN g.lease IS NOT NULL THEN windrow.remember(g.history, g.attempt, g.worker, g.leased_at, g.visible_at, 'expired', g.lease, NULL)
                ELSE g.history
            END AS history,
            NULL::text AS reason
        FROM gone g
        UNION ALL
        SELECT
            t.id, t.queue_id, t.enqueued_at, t.run_at, t.finished_at, t.lease, t.leased_at, t.expires_at, t.priority,
            t.attempt, t.max_attempts, t.kind, t.payload, t.attributes, t.retry, t.dedup_key, t.trace, t.worker,
            t.history, t.reason
        FROM taken_up t
    ) leaving
    CROSS JOIN LATERAL (
        SELECT o.slot FROM windrow.org o WHERE o.org_id = (leaving.queue_id & 4294967295)::integer OFFSET 0
    ) o
    RETURNING slot
), numbered AS (
    UPDATE windrow.owned_slot o
    SET chunk = (%(chunks)s::integer[])[width_bucket(o.slot, %(slots)s::smallint[])]
    WHERE o.slot = ANY (ARRAY(SELECT DISTINCT departed.slot FROM departed))
)
SELECT departed.slot, count(*) AS jobs FROM departed GROUP BY departed.slot ORDER BY departed.slot
