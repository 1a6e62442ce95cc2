-- One page of a queue's scheduled, ready or leased jobs, in the order in which they will be claimed. It ends with the job
-- that fills bytes_max; `found` is how many there would be without. A job's other columns have less than 1 KiB.
SELECT
    p.id::text, p.queue, p.kind, %(state)s::text AS state,
    CASE WHEN %(include_payload)s THEN p.payload END AS payload, p.attributes::text, p.priority, p.enqueued_at, p.run_at,
    p.expires_at, p.attempt, coalesce(p.max_attempts, p.queue_max_attempts) AS max_attempts,
    coalesce(p.retry, p.queue_retry)::text AS retry, p.dedup_key, CASE WHEN p.lease IS NOT NULL THEN p.visible_at END AS deadline,
    p.worker, p.leased_at, NULL::timestamptz AS finished_at, NULL::bytea AS result, NULL::text AS reason, p.history::text,
    p.visible_at, p.found
FROM (
    SELECT
        l.*, count(*) OVER () AS found,
        sum(
            CASE WHEN %(include_payload)s THEN octet_length(l.payload) ELSE 0 END
            + coalesce(octet_length(l.attributes::text), 0) + coalesce(octet_length(l.history::text), 0) + 1024
        ) OVER (
            ORDER BY l.priority, l.visible_at, l.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS bytes_before
    FROM (
        SELECT j.*, q.queue, q.max_attempts AS queue_max_attempts, q.retry AS queue_retry
        FROM windrow.queue q
        JOIN windrow.job j ON j.queue_id = q.queue_id
        WHERE q.org = %(org)s AND q.queue = %(queue)s AND (%(kind)s = '' OR j.kind = %(kind)s)
            AND (j.priority, j.visible_at, j.id)
                > (%(after_priority)s::smallint, timestamptz 'epoch' + %(after_us)s * interval '1 us', %(after_id)s::uuid)
            AND CASE %(state)s::text
                WHEN 'ready' THEN j.visible_at <= now()
                WHEN 'scheduled' THEN j.visible_at > now() AND j.lease IS NULL
                WHEN 'leased' THEN j.visible_at > now() AND j.lease IS NOT NULL
            END
        ORDER BY j.priority, j.visible_at, j.id
        LIMIT %(rows)s
    ) l
) p
WHERE coalesce(p.bytes_before, 0) < %(bytes_max)s
ORDER BY p.priority, p.visible_at, p.id
