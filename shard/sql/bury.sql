-- Sets leased jobs aside as dead: nacked for the last time, killed, or found with no attempts left. `outcome` NULL means
-- that the latest lease was only taken to bury the job: it is not an attempt.
WITH ended AS (
    DELETE FROM windrow.job j
    USING (
        SELECT g.id, g.lease, g.turn, g.outcome, g.error, g.reason
        FROM unnest(
            %(ids)s::uuid[], %(leases)s::bigint[], %(turns)s::smallint[], %(outcomes)s::text[], %(errors)s::text[],
            %(reasons)s::text[]
        ) AS g (id, lease, turn, outcome, error, reason)
        ORDER BY g.id
    ) b
    -- By id alone: see extend.sql.
    WHERE j.id = ANY (ARRAY[b.id])
        AND (j.lease = b.lease AND j.visible_at > now()
            AND j.queue_id & 4294967295 = (SELECT windrow.org_ids(%(orgs)s::text[]))[coalesce(b.turn, 1)]) IS TRUE
    RETURNING j.*, b.outcome, b.error, b.reason
)
INSERT INTO windrow.dead (
    id, queue_id, enqueued_at, run_at, lease, leased_at, expires_at, priority, attempt, max_attempts, kind, payload,
    attributes, retry, dedup_key, trace, worker, history, reason
)
SELECT
    e.id, e.queue_id, e.enqueued_at, e.run_at, e.lease, e.leased_at, e.expires_at, e.priority,
    CASE WHEN e.outcome IS NULL THEN e.attempt - 1 ELSE e.attempt END,
    e.max_attempts, e.kind, e.payload, e.attributes, e.retry, e.dedup_key, e.trace,
    CASE WHEN e.outcome IS NULL THEN e.history -> -1 ->> 'worker' ELSE e.worker END,
    CASE
        WHEN e.outcome IS NULL THEN e.history
        ELSE windrow.remember(e.history, e.attempt, e.worker, e.leased_at, now(), e.outcome, e.lease, e.error)
    END,
    e.reason
FROM ended e
RETURNING id::text, lease
