-- Finishes leased jobs: out of the hot table, into the finished table of the day. One row: how many, and which if fewer
-- than named.
WITH ended AS (
    DELETE FROM windrow.job j
    USING (
        -- In the order of ids, here and wherever leases are ended: calls about the same jobs wait in a line, not in a ring.
        SELECT n.id, n.lease, n.turn, n.result
        FROM unnest(%(ids)s::uuid[], %(leases)s::bigint[], %(turns)s::smallint[], %(results)b::bytea[])
            AS n (id, lease, turn, result)
        ORDER BY n.id
    ) a
    -- By id alone: see extend.sql.
    WHERE j.id = ANY (ARRAY[a.id])
        AND (j.lease = a.lease AND j.visible_at > now()
            AND j.queue_id & 4294967295 = (SELECT windrow.org_ids(%(orgs)s::text[]))[coalesce(a.turn, 1)]) IS TRUE
    RETURNING j.*, a.result
), moved AS (
    INSERT INTO windrow.finished (
        id, queue_id, enqueued_at, run_at, lease, leased_at, expires_at, priority, attempt, max_attempts, state, kind,
        payload, attributes, retry, dedup_key, trace, worker, history, result, finished_at, retention
    )
    SELECT
        e.id, e.queue_id, e.enqueued_at, e.run_at, e.lease, e.leased_at, e.expires_at, e.priority, e.attempt,
        e.max_attempts, 'succeeded', e.kind, e.payload, e.attributes, e.retry, e.dedup_key, e.trace, e.worker, e.history,
        e.result,
        -- A clock that goes back must not hide the job from whoever looks for its id (shard/clock.py).
        greatest(now(), (SELECT timestamptz 'epoch' + c.last_value * interval '1 us' FROM windrow.clock c)),
        coalesce((SELECT q.kept FROM windrow.queue q WHERE q.queue_id = e.queue_id AND q.kept IS NOT NULL), 30)
    FROM ended e
    RETURNING id, lease
)
SELECT
    count(*) AS acked,
    CASE WHEN count(*) < %(jobs)s THEN array_agg(moved.id::text) END AS acked_ids,
    CASE WHEN count(*) < %(jobs)s THEN array_agg(moved.lease) END AS acked_leases
FROM moved
