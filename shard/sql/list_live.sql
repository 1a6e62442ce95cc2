-- One page of a queue's scheduled, ready or leased jobs, in the order in which they will be claimed.
SELECT
    j.id::text, q.queue, j.kind, %(state)s::text AS state,
    CASE WHEN %(include_payload)s THEN j.payload END AS payload, j.attributes::text, j.priority, j.enqueued_at, j.run_at,
    j.expires_at, j.attempt, coalesce(j.max_attempts, q.max_attempts) AS max_attempts, coalesce(j.retry, q.retry)::text AS retry,
    j.dedup_key, CASE WHEN j.lease IS NOT NULL THEN j.visible_at END AS deadline, j.worker, j.leased_at,
    NULL::timestamptz AS finished_at, NULL::bytea AS result, NULL::text AS reason, j.history::text, j.visible_at
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
