-- One page of an org's jobs whose ids are in a stretch, newest id first, wherever they are on this shard: live, dead, about to
-- leave it, finished or cold. It ends with the job that fills bytes_max; `found` is how many there would be without. A job's
-- other columns have less than 1 KiB. Each place gives its own newest ones, by an index; planned for each run, so that only the
-- days since `since` are looked into.
SELECT
    p.id::text, p.queue, p.kind, p.state, CASE WHEN %(include_payload)s THEN p.payload END, p.attributes::text,
    p.priority, p.enqueued_at, p.run_at, p.expires_at, p.attempt, coalesce(p.max_attempts, p.queue_max_attempts),
    coalesce(p.retry, p.queue_retry)::text, p.dedup_key, p.deadline, p.worker, p.leased_at, p.finished_at,
    CASE WHEN %(include_payload)s THEN p.result END, p.reason, p.history::text, p.bytes_through, p.found
FROM (
    SELECT l.*, count(*) OVER () AS found, sum(l.bytes) OVER (ORDER BY l.id DESC ROWS UNBOUNDED PRECEDING)::bigint AS bytes_through
    FROM (
        SELECT
            f.*, q.queue, q.max_attempts AS queue_max_attempts, q.retry AS queue_retry,
            CASE WHEN %(include_payload)s THEN octet_length(f.payload) + coalesce(octet_length(f.result), 0) ELSE 0 END
                + coalesce(octet_length(f.attributes::text), 0) + coalesce(octet_length(f.history::text), 0)
                + coalesce(octet_length(f.reason), 0) + 1024 AS bytes
        FROM (
            (
                SELECT
                    j.id, j.queue_id, j.kind,
                    CASE
                        WHEN j.visible_at <= now() THEN 'ready'
                        WHEN j.lease IS NULL THEN 'scheduled'
                        ELSE 'leased'
                    END AS state,
                    j.payload, j.attributes, j.priority, j.enqueued_at, j.run_at, j.expires_at, j.attempt, j.max_attempts,
                    j.retry, j.dedup_key, CASE WHEN j.lease IS NOT NULL THEN j.visible_at END AS deadline, j.worker,
                    j.leased_at, NULL::timestamptz AS finished_at, NULL::bytea AS result, NULL::text AS reason, j.history
                FROM windrow.job j
                WHERE j.queue_id = ANY (%(queue_ids)s::bigint[]) AND j.id >= %(from_id)s::uuid AND j.id < %(before_id)s::uuid
                    AND (%(kind)s = '' OR j.kind = %(kind)s)
                    AND CASE %(state)s::text
                        WHEN '' THEN true
                        WHEN 'ready' THEN j.visible_at <= now()
                        WHEN 'scheduled' THEN j.visible_at > now() AND j.lease IS NULL
                        WHEN 'leased' THEN j.visible_at > now() AND j.lease IS NOT NULL
                        ELSE false
                    END
                ORDER BY j.id DESC
                LIMIT %(rows)s
            )
            UNION ALL
            (
                SELECT
                    d.id, d.queue_id, d.kind, 'dead', d.payload, d.attributes, d.priority, d.enqueued_at, d.run_at,
                    d.expires_at, d.attempt, d.max_attempts, d.retry, d.dedup_key, NULL, d.worker, d.leased_at, d.finished_at,
                    NULL, d.reason, d.history
                FROM windrow.dead d
                WHERE d.queue_id = ANY (%(queue_ids)s::bigint[]) AND d.id >= %(from_id)s::uuid AND d.id < %(before_id)s::uuid
                    AND (%(kind)s = '' OR d.kind = %(kind)s) AND %(state)s::text IN ('', 'dead')
                ORDER BY d.id DESC
                LIMIT %(rows)s
            )
            UNION ALL
            (
                SELECT
                    d.id, d.queue_id, d.kind, d.state, d.payload, d.attributes, d.priority, d.enqueued_at, d.run_at,
                    d.expires_at, d.attempt, d.max_attempts, d.retry, d.dedup_key, NULL, d.worker, d.leased_at, d.finished_at,
                    NULL, d.reason, d.history
                FROM (
                    SELECT
                        g.*,
                        CASE
                            WHEN g.reason IS NOT NULL THEN 'dead'
                            WHEN g.run_at <= now() THEN 'ready'
                            ELSE 'scheduled'
                        END AS state
                    FROM windrow.departing g
                    WHERE g.slot = %(slot)s::smallint
                ) d
                WHERE d.queue_id = ANY (%(queue_ids)s::bigint[]) AND d.id >= %(from_id)s::uuid AND d.id < %(before_id)s::uuid
                    AND (%(kind)s = '' OR d.kind = %(kind)s) AND (%(state)s::text = '' OR d.state = %(state)s)
                ORDER BY d.id DESC
                LIMIT %(rows)s
            )
            UNION ALL
            (
                SELECT
                    h.id, h.queue_id, h.kind, h.state, h.payload, h.attributes, h.priority, h.enqueued_at, h.run_at,
                    h.expires_at, h.attempt, h.max_attempts, h.retry, h.dedup_key, NULL, h.worker, h.leased_at, h.finished_at,
                    h.result, h.reason, h.history
                FROM windrow.finished h
                WHERE h.queue_id & 4294967295 = %(org_id)s::bigint
                    AND (%(queue)s = '' OR h.queue_id = ANY (%(queue_ids)s::bigint[]))
                    AND h.id >= %(from_id)s::uuid AND h.id < %(before_id)s::uuid AND h.finished_at >= %(since)s
                    AND (%(kind)s = '' OR h.kind = %(kind)s)
                    AND %(state)s::text IN ('', 'succeeded', 'cancelled') AND (%(state)s::text = '' OR h.state = %(state)s)
                ORDER BY h.id DESC
                LIMIT %(rows)s
            )
            UNION ALL
            (
                SELECT
                    c.id, c.queue_id, c.kind, c.state, c.payload, c.attributes, c.priority, c.enqueued_at, c.run_at,
                    c.expires_at, c.attempt, c.max_attempts, c.retry, c.dedup_key, NULL, c.worker, c.leased_at, c.finished_at,
                    c.result, c.reason, c.history
                FROM windrow.cold c
                WHERE c.queue_id & 4294967295 = %(org_id)s::bigint
                    AND (%(queue)s = '' OR c.queue_id = ANY (%(queue_ids)s::bigint[]))
                    AND c.id >= %(from_id)s::uuid AND c.id < %(before_id)s::uuid AND c.finished_at >= %(since)s
                    AND (%(kind)s = '' OR c.kind = %(kind)s)
                    AND %(state)s::text IN ('', 'succeeded', 'cancelled') AND (%(state)s::text = '' OR c.state = %(state)s)
                ORDER BY c.id DESC
                LIMIT %(rows)s
            )
        ) f
        JOIN windrow.queue q ON q.queue_id = f.queue_id
        WHERE q.org = %(org)s
        ORDER BY f.id DESC
        LIMIT %(rows)s
    ) l
) p
WHERE p.bytes_through - p.bytes < %(bytes_max)s
ORDER BY p.id DESC
