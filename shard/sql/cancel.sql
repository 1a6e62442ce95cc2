-- Cancels jobs that have not finished, leased and dead ones too. Tells of those that depart, and so are not touched.
WITH live AS (
    DELETE FROM windrow.job j
    WHERE j.id = ANY (%(ids)s::uuid[])
        AND j.queue_id & 4294967295 = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    RETURNING
        id, queue_id, enqueued_at, run_at, lease, leased_at, expires_at, priority, attempt, max_attempts, kind, payload,
        attributes, retry, dedup_key, trace, worker,
        -- A lease ends here without an outcome of its own: STALE is what its consumer hears.
        history
), aside AS (
    DELETE FROM windrow.dead d
    WHERE d.id = ANY (%(ids)s::uuid[])
        AND d.queue_id & 4294967295 = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    RETURNING
        id, queue_id, enqueued_at, run_at, lease, leased_at, expires_at, priority, attempt, max_attempts, kind, payload,
        attributes, retry, dedup_key, trace, worker, history
), cancelled AS (
    INSERT INTO windrow.finished (
        id, queue_id, enqueued_at, run_at, lease, leased_at, expires_at, priority, attempt, max_attempts, kind, payload,
        attributes, retry, dedup_key, trace, worker, history, state, reason, finished_at, retention
    )
    SELECT ended.*, 'cancelled', %(reason)s, greatest(now(), (SELECT timestamptz 'epoch' + c.last_value * interval '1 us' FROM windrow.clock c)),
        coalesce((SELECT q.kept FROM windrow.queue q WHERE q.queue_id = ended.queue_id AND q.kept IS NOT NULL), 30)
    FROM (SELECT * FROM live UNION ALL SELECT * FROM aside) ended
    RETURNING id
)
SELECT c.id::text, false AS departing FROM cancelled c
UNION ALL
SELECT d.id::text, true
FROM windrow.departing d
WHERE d.id = ANY (%(ids)s::uuid[])
    AND d.queue_id & 4294967295 = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
