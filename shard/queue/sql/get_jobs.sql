-- Returns jobs by id, from every table of this shard: live, dead, departing, finished and cold jobs, in the order of
-- the ids. The org is a condition of each index search, so that no row of another org is read. The reason: the time
-- that a call takes must not show whether another org has an id. The jobs that follow the job that fills bytes_max are
-- not whole: they are returned without their large columns. The other columns of a job have less than 1 KiB.
SELECT
    k.id::text, k.queue, k.state, k.priority, k.enqueued_at, k.run_at, k.expires_at, k.attempt,
    coalesce(k.max_attempts, CASE WHEN NOT %(as_stored)s THEN k.queue_max_attempts END) AS max_attempts,
    CASE WHEN k.whole AND %(include_payload)s THEN k.payload END AS payload,
    CASE WHEN k.whole THEN k.attributes::text END AS attributes,
    coalesce(k.retry, CASE WHEN NOT %(as_stored)s THEN k.queue_retry END)::text AS retry,
    {{short_content(k)}}, k.deadline, k.worker, k.leased_at, k.finished_at,
    CASE WHEN k.whole AND %(include_payload)s THEN k.result END AS result, CASE WHEN k.whole THEN k.reason END AS reason,
    CASE WHEN k.whole THEN k.history::text END AS history,
    CASE WHEN k.whole THEN k.progress::text END AS progress, CASE WHEN k.whole AND %(include_payload)s THEN k.checkpoint END AS checkpoint, k.whole
FROM (
    SELECT
        f.*, q.queue, q.max_attempts AS queue_max_attempts, q.retry AS queue_retry,
        coalesce(
            sum(
                CASE WHEN %(include_payload)s THEN octet_length(f.payload) + coalesce(octet_length(f.result), 0) ELSE 0 END
                + CASE WHEN %(include_payload)s THEN coalesce(octet_length(f.checkpoint), 0) ELSE 0 END
                + coalesce(octet_length(f.progress::text), 0)
                + coalesce(octet_length(f.attributes::text), 0) + coalesce(octet_length(f.history::text), 0)
                + coalesce(octet_length(f.reason), 0) + 1024
            ) OVER (
                ORDER BY array_position(%(ids)s::uuid[], f.id) ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ),
            0
        ) < %(bytes_max)s AS whole
    FROM (
        SELECT
            j.id, j.queue_id,
            CASE
                WHEN {{is_due(j)}} THEN 'ready'
                WHEN {{is_blocked(j)}} THEN 'blocked'
                WHEN j.lease IS NULL THEN 'scheduled'
                ELSE 'leased'
            END AS state,
            {{answer_columns(j)}}, CASE WHEN j.lease IS NOT NULL THEN j.visible_at END AS deadline, j.worker, j.leased_at,
            NULL::timestamptz AS finished_at, NULL::bytea AS result, NULL::text AS reason,
            {{seen_history(j)}} AS history
        FROM windrow.job j
        WHERE j.id = ANY (%(ids)s::uuid[])
            AND {{org_of(j)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
        UNION ALL
        SELECT
            d.id, d.queue_id, 'dead', {{answer_columns(d)}}, NULL, d.worker, d.leased_at, d.finished_at, NULL, d.reason,
            d.history
        FROM windrow.dead d
        WHERE d.id = ANY (%(ids)s::uuid[])
            AND {{org_of(d)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
        UNION ALL
        SELECT
            d.id, d.queue_id,
            CASE WHEN d.reason IS NOT NULL THEN 'dead' WHEN d.run_at <= now() THEN 'ready' WHEN {{is_blocked(d)}} THEN 'blocked' ELSE 'scheduled' END,
            {{answer_columns(d)}}, NULL, d.worker, d.leased_at, d.finished_at, NULL, d.reason, d.history
        FROM windrow.departing d
        WHERE d.id = ANY (%(ids)s::uuid[])
            AND {{org_of(d)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
        UNION ALL
        SELECT
            f.id, f.queue_id, f.state, {{answer_columns(f)}}, NULL, f.worker, f.leased_at, f.finished_at, f.result, f.reason,
            f.history
        FROM windrow.finished f
        WHERE f.id = ANY (%(ids)s::uuid[])
            AND {{org_of(f)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
            AND f.finished_at >= least(to_timestamp(%(oldest_ms)s / 1000.0), now()) - interval '2 hours'
        UNION ALL
        SELECT
            c.id, c.queue_id, c.state, {{answer_columns(c)}}, NULL, c.worker, c.leased_at, c.finished_at, c.result, c.reason,
            c.history
        FROM windrow.find_cold(
            %(ids)s::uuid[], least(to_timestamp(%(oldest_ms)s / 1000.0), now()) - interval '2 hours',
            (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
        ) c
        -- OFFSET 0 makes Postgres first find the few jobs by their ids, and then their queues. It never scans all jobs
        -- of the org's queues.
        OFFSET 0
    ) f
    CROSS JOIN LATERAL (SELECT * FROM windrow.queue WHERE queue_id = f.queue_id OFFSET 0) q
    WHERE q.org = %(org)s
) k
