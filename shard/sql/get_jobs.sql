-- Jobs by id, wherever they are on this shard: live, dead, finished, or about to leave it. OFFSET 0 fences: first the few jobs by their ids,
-- then their queues; never all jobs of the org's queues.
SELECT
    j.id::text, q.queue, j.kind,
    CASE
        WHEN j.visible_at <= now() THEN 'ready'
        WHEN j.lease IS NULL THEN 'scheduled'
        ELSE 'leased'
    END AS state,
    CASE WHEN %(include_payload)s THEN j.payload END AS payload, j.attributes::text, j.priority, j.enqueued_at, j.run_at,
    j.expires_at, j.attempt, coalesce(j.max_attempts, q.max_attempts) AS max_attempts, coalesce(j.retry, q.retry)::text AS retry,
    j.dedup_key, CASE WHEN j.lease IS NOT NULL THEN j.visible_at END AS deadline, j.worker, j.leased_at,
    NULL::timestamptz AS finished_at, NULL::bytea AS result, NULL::text AS reason, j.history::text
FROM (SELECT * FROM windrow.job WHERE id = ANY (%(ids)s::uuid[]) OFFSET 0) j
CROSS JOIN LATERAL (SELECT * FROM windrow.queue WHERE queue_id = j.queue_id OFFSET 0) q
WHERE q.org = %(org)s
UNION ALL
SELECT
    d.id::text, q.queue, d.kind, 'dead', CASE WHEN %(include_payload)s THEN d.payload END, d.attributes::text, d.priority,
    d.enqueued_at, d.run_at, d.expires_at, d.attempt, coalesce(d.max_attempts, q.max_attempts),
    coalesce(d.retry, q.retry)::text, d.dedup_key, NULL, d.worker, d.leased_at, d.finished_at, NULL, d.reason,
    d.history::text
FROM (SELECT * FROM windrow.dead WHERE id = ANY (%(ids)s::uuid[]) OFFSET 0) d
CROSS JOIN LATERAL (SELECT * FROM windrow.queue WHERE queue_id = d.queue_id OFFSET 0) q
WHERE q.org = %(org)s
UNION ALL
SELECT
    d.id::text, q.queue, d.kind,
    CASE WHEN d.reason IS NOT NULL THEN 'dead' WHEN d.run_at <= now() THEN 'ready' ELSE 'scheduled' END,
    CASE WHEN %(include_payload)s THEN d.payload END, d.attributes::text, d.priority, d.enqueued_at, d.run_at,
    d.expires_at, d.attempt, coalesce(d.max_attempts, q.max_attempts), coalesce(d.retry, q.retry)::text, d.dedup_key,
    NULL, d.worker, d.leased_at, d.finished_at, NULL, d.reason, d.history::text
FROM (SELECT * FROM windrow.departing WHERE id = ANY (%(ids)s::uuid[]) OFFSET 0) d
CROSS JOIN LATERAL (SELECT * FROM windrow.queue WHERE queue_id = d.queue_id OFFSET 0) q
WHERE q.org = %(org)s
UNION ALL
SELECT
    f.id::text, q.queue, f.kind, f.state, CASE WHEN %(include_payload)s THEN f.payload END, f.attributes::text,
    f.priority, f.enqueued_at, f.run_at, f.expires_at, f.attempt, coalesce(f.max_attempts, q.max_attempts),
    coalesce(f.retry, q.retry)::text, f.dedup_key, NULL, f.worker, f.leased_at, f.finished_at,
    CASE WHEN %(include_payload)s THEN f.result END, f.reason, f.history::text
FROM (
    SELECT * FROM windrow.finished
    WHERE id = ANY (%(ids)s::uuid[])
        AND finished_at >= least(to_timestamp(%(oldest_ms)s / 1000.0), now()) - interval '1 hour'
    OFFSET 0
) f
CROSS JOIN LATERAL (SELECT * FROM windrow.queue WHERE queue_id = f.queue_id OFFSET 0) q
WHERE q.org = %(org)s
