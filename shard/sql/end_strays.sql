-- Ends jobs that were set aside here and live on another shard. Those that were brought there are deleted. The others were
-- there already: they are cancelled here, for these reasons. Answers how many were deleted, and how many cancelled.
WITH ended AS (
    DELETE FROM windrow.departing d
    WHERE d.slot = %(slot)s AND d.id = ANY (%(brought)s::uuid[] || %(known)s::uuid[])
        AND d.queue_id & 4294967295 = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    RETURNING d.*
), forgotten AS (
    INSERT INTO windrow.tally (org_id, accepted)
    SELECT (e.queue_id & 4294967295)::integer, -count(*)
    FROM ended e
    WHERE e.id = ANY (%(brought)s::uuid[])
    GROUP BY 1
), cancelled AS (
    INSERT INTO windrow.finished (
        id, queue_id, enqueued_at, run_at, lease, leased_at, expires_at, priority, attempt, max_attempts, kind, payload,
        attributes, retry, dedup_key, trace, worker, history, state, reason, finished_at, retention
    )
    SELECT
        e.id, e.queue_id, e.enqueued_at, e.run_at, e.lease, e.leased_at, e.expires_at, e.priority, e.attempt,
        e.max_attempts, e.kind, e.payload, e.attributes, e.retry, e.dedup_key, e.trace, e.worker, e.history, 'cancelled',
        n.reason,
        greatest(now(), (SELECT timestamptz 'epoch' + c.last_value * interval '1 us' FROM windrow.clock c)),
        coalesce((SELECT q.kept FROM windrow.queue q WHERE q.queue_id = e.queue_id AND q.kept IS NOT NULL), 30)
    FROM unnest(%(known)s::uuid[], %(reasons)s::text[]) AS n (id, reason)
    JOIN ended e ON e.id = n.id
    RETURNING id
)
SELECT (SELECT count(*) FROM ended) - (SELECT count(*) FROM cancelled), (SELECT count(*) FROM cancelled)
