-- Returns one page of an org's jobs with ids in a range, the newest id first, from all tables of this shard: live,
-- dead, exported, finished and cold. The page ends with the job that fills `bytes_max`. `found`: how many jobs the page
-- would have without this limit. The large columns of a job count with their sizes. Its other columns together have
-- less than 1 KiB, and count as 1 KiB. The statement reads the newest jobs of each table, which an index finds. The
-- statement is planned for each run, so that Postgres searches only the partitions from `since` on.
SELECT
    p.id::text, p.queue, p.state, p.priority, p.enqueued_at, p.run_at, p.expires_at, p.attempt,
    coalesce(p.max_attempts, p.queue_max_attempts) AS max_attempts,
    CASE WHEN %(include_payload)s THEN p.payload END AS payload, p.attributes::text,
    coalesce(p.retry, p.queue_retry)::text AS retry, {{short_content(p)}}, p.deadline, p.worker, p.leased_at,
    p.finished_at, CASE WHEN %(include_payload)s THEN p.result END AS result, p.reason, p.history::text, p.progress::text,
    CASE WHEN %(include_payload)s THEN p.checkpoint END AS checkpoint, p.bytes_through, p.found
FROM (
    SELECT l.*, count(*) OVER () AS found, sum(l.bytes) OVER (ORDER BY l.id DESC ROWS UNBOUNDED PRECEDING)::bigint AS bytes_through
    FROM (
        SELECT
            f.*, q.queue, q.max_attempts AS queue_max_attempts, q.retry AS queue_retry,
            CASE WHEN %(include_payload)s THEN octet_length(f.payload) + coalesce(octet_length(f.result), 0) ELSE 0 END
                + CASE WHEN %(include_payload)s THEN coalesce(octet_length(f.checkpoint), 0) ELSE 0 END
                + coalesce(octet_length(f.progress::text), 0)
                + coalesce(octet_length(f.attributes::text), 0) + coalesce(octet_length(f.history::text), 0)
                + coalesce(octet_length(f.reason), 0) + 1024 AS bytes
        FROM (
            (
                SELECT
                    j.id, j.queue_id,
                    CASE
                        WHEN {{is_due(j)}} THEN 'ready'
                        WHEN {{is_blocked(j)}} THEN 'blocked'
                        WHEN j.lease IS NULL THEN 'scheduled'
                        ELSE 'leased'
                    END AS state,
                    {{answer_columns(j)}}, CASE WHEN j.lease IS NOT NULL THEN j.visible_at END AS deadline, j.worker,
                    j.leased_at, NULL::timestamptz AS finished_at, NULL::bytea AS result, NULL::text AS reason,
                    {{seen_history(j)}} AS history
                FROM windrow.job j
                WHERE j.queue_id = ANY (%(queue_ids)s::bigint[]) AND {{org_of(j)}} = %(org_id)s::bigint
                    AND j.id >= %(from_id)s::uuid AND j.id < %(before_id)s::uuid
                    AND (%(kind)s = '' OR j.kind = %(kind)s)
                    AND (%(attributes)s::jsonb IS NULL OR j.attributes @> %(attributes)s::jsonb)
                    AND %(states)s::text[] && '{blocked,scheduled,ready,leased}'
                    AND CASE
                        WHEN {{is_due(j)}} THEN 'ready'
                        WHEN {{is_blocked(j)}} THEN 'blocked'
                        WHEN j.lease IS NULL THEN 'scheduled'
                        ELSE 'leased'
                    END = ANY (%(states)s::text[])
                ORDER BY j.id DESC
                LIMIT %(rows)s
            )
            UNION ALL
            (
                SELECT
                    d.id, d.queue_id, 'dead', {{answer_columns(d)}}, NULL, d.worker, d.leased_at, d.finished_at,
                    NULL, d.reason, d.history
                FROM windrow.dead d
                WHERE d.queue_id = ANY (%(queue_ids)s::bigint[]) AND d.id >= %(from_id)s::uuid AND d.id < %(before_id)s::uuid
                    AND (%(kind)s = '' OR d.kind = %(kind)s)
                    AND (%(attributes)s::jsonb IS NULL OR d.attributes @> %(attributes)s::jsonb) AND 'dead' = ANY (%(states)s::text[])
                ORDER BY d.id DESC
                LIMIT %(rows)s
            )
            UNION ALL
            (
                SELECT
                    d.id, d.queue_id, d.state, {{answer_columns(d)}}, NULL, d.worker, d.leased_at, d.finished_at,
                    NULL, d.reason, d.history
                FROM (
                    SELECT
                        g.*,
                        CASE
                            WHEN g.reason IS NOT NULL THEN 'dead'
                            WHEN g.run_at <= now() THEN 'ready'
                            WHEN {{is_blocked(g)}} THEN 'blocked'
                            ELSE 'scheduled'
                        END AS state
                    FROM windrow.departing g
                    WHERE g.slot = %(slot)s::smallint
                ) d
                WHERE d.queue_id = ANY (%(queue_ids)s::bigint[]) AND d.id >= %(from_id)s::uuid AND d.id < %(before_id)s::uuid
                    AND (%(kind)s = '' OR d.kind = %(kind)s)
                    AND (%(attributes)s::jsonb IS NULL OR d.attributes @> %(attributes)s::jsonb) AND d.state = ANY (%(states)s::text[])
                ORDER BY d.id DESC
                LIMIT %(rows)s
            )
            UNION ALL
            (
                SELECT
                    h.id, h.queue_id, h.state, {{answer_columns(h)}}, NULL, h.worker, h.leased_at, h.finished_at,
                    h.result, h.reason, h.history
                FROM windrow.finished h
                WHERE {{org_of(h)}} = %(org_id)s::bigint
                    AND (%(queue)s = '' OR h.queue_id = ANY (%(queue_ids)s::bigint[]))
                    AND h.id >= %(from_id)s::uuid AND h.id < %(before_id)s::uuid AND h.finished_at >= %(since)s
                    AND (%(kind)s = '' OR h.kind = %(kind)s)
                    AND (%(attributes)s::jsonb IS NULL OR h.attributes @> %(attributes)s::jsonb)
                    AND %(states)s::text[] && '{succeeded,cancelled}' AND h.state = ANY (%(states)s::text[])
                ORDER BY h.id DESC
                LIMIT %(rows)s
            )
            UNION ALL
            (
                SELECT
                    c.id, c.queue_id, c.state, {{answer_columns(c)}}, NULL, c.worker, c.leased_at, c.finished_at,
                    c.result, c.reason, c.history
                FROM windrow.cold c
                WHERE {{org_of(c)}} = %(org_id)s::bigint
                    AND (%(queue)s = '' OR c.queue_id = ANY (%(queue_ids)s::bigint[]))
                    AND c.id >= %(from_id)s::uuid AND c.id < %(before_id)s::uuid AND c.finished_at >= %(since)s
                    AND (%(kind)s = '' OR c.kind = %(kind)s)
                    AND (%(attributes)s::jsonb IS NULL OR c.attributes @> %(attributes)s::jsonb)
                    AND %(states)s::text[] && '{succeeded,cancelled}' AND c.state = ANY (%(states)s::text[])
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
