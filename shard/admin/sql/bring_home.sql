-- Stores jobs of one org that were stray on another shard, if this shard owns the org's slot since this epoch or an
-- earlier epoch. Returns how many of the queues were admitted, and which jobs were stored. If not all queues were
-- admitted, stores nothing. Does not store a live job that is live on this shard already, or a dead job that is dead on
-- this shard already. Fails with WD001, and stores nothing, if this shard has one of the jobs in another state, for
-- example finished.
WITH lane AS MATERIALIZED (
    -- For OFFSET 0, see enqueue.sql.
    SELECT q.queue_id, n.jobs
    FROM unnest(%(queues)s::text[], %(jobs)s::text[]) AS n (queue, jobs)
    CROSS JOIN LATERAL (
        SELECT q.queue_id, q.slot FROM windrow.queue q WHERE q.org = %(org)s AND q.queue = n.queue OFFSET 0
    ) q
    CROSS JOIN LATERAL (SELECT s.state, s.epoch FROM windrow.owned_slot s WHERE s.slot = q.slot OFFSET 0) s
    WHERE s.state = 'owned' AND s.epoch <= %(epoch)s
), arrived AS MATERIALIZED (
    SELECT
        lane.queue_id AS here, d.*, coalesce(n.due, d.run_at) AS due,
        CASE WHEN n.is_signal THEN n.due ELSE d.expires_at END AS expires
    FROM lane
    CROSS JOIN LATERAL unnest(lane.jobs::windrow.departing[]) d
    -- If the stray copy of a job is blocked, but on this shard the job's node was released or has ended, the job
    -- becomes due now, because nothing else would release it. So the job runs again, like other jobs whose ends were
    -- lost. If the job's node waits for a signal, the job waits for the signal again.
    LEFT JOIN LATERAL (
        SELECT n.is_signal, now() + CASE WHEN n.is_signal THEN coalesce(n.delay_us, 0) ELSE 0 END * interval '1 us' AS due
        FROM windrow.workflow w
        JOIN windrow.workflow_node n ON n.flow = w.flow AND n.node = substr(d.workflow_node, 38)::integer
        WHERE {{is_blocked(d)}} AND w.org_id = lane.queue_id & 4294967295 AND w.id = left(d.workflow_node, 36)::uuid
            AND n.job_id = d.id AND n.state NOT IN ('blocked', 'due', 'doomed')
        OFFSET 0
    ) n ON true
    WHERE (SELECT count(*) FROM lane) = cardinality(%(queues)s::text[]) AND d.id = ANY (%(ids)s::uuid[])
), live AS (
    INSERT INTO windrow.job (
        id, queue_id, enqueued_at, run_at, visible_at, expires_at, priority, attempt, max_attempts,
        {{kept_content}}, history
    )
    SELECT
        a.id, a.here, a.enqueued_at, a.due, a.due, a.expires, a.priority, a.attempt, a.max_attempts,
        -- Leave out the live key, because a job that was enqueued on this shard in the meantime may have the same key.
        {{unkeyed_content(a)}}, a.history
    FROM arrived a
    WHERE a.reason IS NULL
    ORDER BY a.id
    ON CONFLICT DO NOTHING
    RETURNING id, queue_id
), aside AS (
    INSERT INTO windrow.dead (
        id, queue_id, enqueued_at, run_at, finished_at, lease, leased_at, expires_at, priority, attempt, max_attempts,
        {{kept_content}}, worker, history, reason
    )
    SELECT
        a.id, a.here, a.enqueued_at, a.run_at, a.finished_at, a.lease, a.leased_at, a.expires_at, a.priority, a.attempt,
        a.max_attempts, {{kept_content(a)}}, a.worker, a.history, a.reason
    FROM arrived a
    WHERE a.reason IS NOT NULL
    ORDER BY a.id
    ON CONFLICT DO NOTHING
    RETURNING id, queue_id
), stored AS (
    SELECT live.id, live.queue_id, false AS is_dead FROM live
    UNION ALL
    SELECT aside.id, aside.queue_id, true FROM aside
), counted AS (
    INSERT INTO windrow.tally (org_id, accepted)
    SELECT ({{org_of(s)}})::integer, count(*) FROM stored s GROUP BY 1
)
SELECT
    (SELECT count(*) FROM lane) AS admitted, array_agg(s.id::text) AS stored,
    windrow.refuse_settled(
        array_agg(s.id) FILTER (WHERE NOT s.is_dead), array_agg(s.queue_id) FILTER (WHERE NOT s.is_dead),
        least(to_timestamp(%(oldest_ms)s / 1000.0), now()) - interval '2 hours'
    ),
    windrow.refuse_revived(
        array_agg(s.id) FILTER (WHERE s.is_dead), array_agg(s.queue_id) FILTER (WHERE s.is_dead),
        least(to_timestamp(%(oldest_ms)s / 1000.0), now()) - interval '2 hours'
    )
FROM stored s
