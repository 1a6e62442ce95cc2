-- One page of a queue's succeeded or cancelled jobs, newest id first. It ends with the job that fills bytes_max; `found` is
-- how many there would be without. A job's other columns have less than 1 KiB.
SELECT
    p.id::text, p.queue, p.kind, p.state, CASE WHEN %(include_payload)s THEN p.payload END, p.attributes::text,
    p.priority, p.enqueued_at, p.run_at, p.expires_at, p.attempt, coalesce(p.max_attempts, p.queue_max_attempts),
    coalesce(p.retry, p.queue_retry)::text, p.dedup_key, NULL::timestamptz, p.worker, p.leased_at, p.finished_at,
    CASE WHEN %(include_payload)s THEN p.result END, p.reason, p.history::text, p.found
FROM (
    SELECT
        l.*, count(*) OVER () AS found,
        sum(
            CASE WHEN %(include_payload)s THEN octet_length(l.payload) + coalesce(octet_length(l.result), 0) ELSE 0 END
            + coalesce(octet_length(l.attributes::text), 0) + coalesce(octet_length(l.history::text), 0)
            + coalesce(octet_length(l.reason), 0) + 1024
        ) OVER (ORDER BY l.id DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before
    FROM (
        SELECT f.*, q.queue, q.max_attempts AS queue_max_attempts, q.retry AS queue_retry
        FROM windrow.queue q
        JOIN LATERAL (
            SELECT * FROM windrow.finished
            UNION ALL
            SELECT * FROM windrow.cold WHERE queue_id & 4294967295 = q.org_id
        ) f ON f.queue_id = q.queue_id
        WHERE q.org = %(org)s AND q.queue = %(queue)s AND (%(kind)s = '' OR f.kind = %(kind)s) AND f.state = %(state)s
            AND f.id < %(before_id)s::uuid
        ORDER BY f.id DESC
        LIMIT %(rows)s
    ) l
) p
WHERE coalesce(p.bytes_before, 0) < %(bytes_max)s
ORDER BY p.id DESC
