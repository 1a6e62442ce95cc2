-- Moves jobs of these slots to windrow.departing: live jobs without a valid lease, and dead jobs. Another shard gets
-- the jobs from there. The jobs of a slot get the number of the slot's next chunk. The array of slots must be in
-- ascending order. Takes at most `rows` jobs, and stops after the job that fills `bytes`. Returns the number of jobs by
-- slot.
WITH slot AS MATERIALIZED (
    -- Each slot is locked when the scan reaches it. A concurrent statement with the same chunk number waits, and then
    -- finds that this number is not the next number any more.
    SELECT o.slot
    FROM unnest(%(slots)s::smallint[], %(chunks)s::integer[]) AS n (slot, chunk)
    CROSS JOIN LATERAL (
        SELECT o.slot
        FROM windrow.owned_slot o
        WHERE o.slot = n.slot AND o.state = 'draining' AND o.epoch = %(epoch)s AND o.chunk = n.chunk - 1
        FOR UPDATE
    ) o
), live AS MATERIALIZED (
    -- There is no ORDER BY at this level. So Postgres scans the queues lazily, one after another, and locks no more
    -- rows than may be exported.
    SELECT free.ctid, free.bytes
    FROM slot
    -- For OFFSET 0, see read_queues.sql.
    CROSS JOIN LATERAL (SELECT o.org FROM windrow.org o WHERE o.slot = slot.slot OFFSET 0) o
    CROSS JOIN LATERAL (SELECT q.queue_id FROM windrow.queue q WHERE q.org = o.org OFFSET 0) q
    CROSS JOIN LATERAL (
        SELECT
            j.ctid,
            octet_length(j.payload) + coalesce(octet_length(j.attributes::text), 0)
                + coalesce(octet_length(j.history::text), 0) + coalesce(octet_length(j.log), 0)
                + coalesce(octet_length(j.checkpoint), 0) AS bytes
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
                + coalesce(octet_length(d.history::text), 0)
                + coalesce(octet_length(d.checkpoint), 0) AS bytes
        FROM windrow.dead d
        WHERE d.queue_id = q.queue_id
        LIMIT %(rows)s
        FOR UPDATE SKIP LOCKED
    ) free
    LIMIT %(rows)s - (SELECT count(*) FROM live)
), fitting AS MATERIALIZED (
    -- Rows that exceed the limit were locked, but are not exported and not changed.
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
        slot, epoch, chunk,
        id, queue_id, enqueued_at, run_at, finished_at, lease, leased_at, expires_at, priority, attempt, max_attempts,
        {{kept_content}}, worker, history, reason, group_slot
    )
    SELECT
        o.slot, %(epoch)s, (%(chunks)s::integer[])[width_bucket(o.slot, %(slots)s::smallint[])], leaving.*
    FROM (
        SELECT
            g.id, g.queue_id, g.enqueued_at,
            -- If a lease has expired and no claim has noticed this, record the end of the lease now, by the clock of
            -- the server that gave the lease.
            CASE WHEN g.lease IS NULL THEN g.run_at ELSE g.visible_at END AS run_at, NULL::timestamptz AS finished_at, NULL::bigint AS lease,
            NULL::timestamptz AS leased_at, g.expires_at, g.priority, g.attempt, g.max_attempts, {{kept_content(g)}},
            NULL::text AS worker,
            {{history_with_lost(g)}} AS history,
            NULL::text AS reason, g.group_slot
        FROM gone g
        UNION ALL
        SELECT
            t.id, t.queue_id, t.enqueued_at, t.run_at, t.finished_at, t.lease, t.leased_at, t.expires_at, t.priority,
            t.attempt, t.max_attempts, {{kept_content(t)}}, t.worker, t.history, t.reason, NULL
        FROM taken_up t
    ) leaving
    CROSS JOIN LATERAL (
        SELECT o.slot FROM windrow.org o WHERE o.org_id = ({{org_of(leaving)}})::integer OFFSET 0
    ) o
    RETURNING slot
), numbered AS (
    UPDATE windrow.owned_slot o
    SET chunk = (%(chunks)s::integer[])[width_bucket(o.slot, %(slots)s::smallint[])]
    WHERE o.slot = ANY (ARRAY(SELECT DISTINCT departed.slot FROM departed))
)
SELECT departed.slot, count(*) AS jobs FROM departed GROUP BY departed.slot ORDER BY departed.slot
