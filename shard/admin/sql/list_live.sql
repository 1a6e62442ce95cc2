-- Returns one page of a queue's blocked, scheduled, ready or leased jobs, including exported jobs, in the order in
-- which they will be claimed. The page ends with the job that fills `bytes_max`. `found`: how many jobs the page would
-- have without this limit. The large columns of a job count with their sizes. Its other columns together have less than
-- 1 KiB, and count as 1 KiB.
SELECT
    p.id::text, p.queue, %(state)s::text AS state, p.priority, p.enqueued_at, p.run_at, p.expires_at, p.attempt,
    coalesce(p.max_attempts, p.queue_max_attempts) AS max_attempts,
    CASE WHEN %(include_payload)s THEN p.payload END AS payload, p.attributes::text,
    coalesce(p.retry, p.queue_retry)::text AS retry, {{short_content(p)}},
    CASE WHEN p.lease IS NOT NULL THEN p.visible_at END AS deadline, p.worker, p.leased_at, NULL::timestamptz AS finished_at, NULL::bytea AS result, NULL::text AS reason, p.history::text,
    p.progress::text, CASE WHEN %(include_payload)s THEN p.checkpoint END AS checkpoint,
    -- Jobs that are blocked, wait for a group slot or are set aside have the `visible_at` 'infinity', and come last.
    -- Return a finite time instead, because the key of the next page cannot be infinite.
    least(p.visible_at, timestamptz '9999-12-31') AS visible_at, p.found
FROM (
    SELECT
        l.*, count(*) OVER () AS found,
        sum(
            CASE WHEN %(include_payload)s THEN octet_length(l.payload) ELSE 0 END
            + CASE WHEN %(include_payload)s THEN coalesce(octet_length(l.checkpoint), 0) ELSE 0 END
            + coalesce(octet_length(l.attributes::text), 0) + coalesce(octet_length(l.history::text), 0)
            + coalesce(octet_length(l.progress::text), 0) + 1024
        ) OVER (
            ORDER BY l.priority, l.visible_at, l.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS bytes_before
    FROM (
        SELECT f.*, q.queue, q.max_attempts AS queue_max_attempts, q.retry AS queue_retry
        FROM (
            (
                SELECT
                    j.id, j.queue_id, {{answer_columns(j)}}, j.visible_at, j.lease, j.worker, j.leased_at,
                    {{seen_history(j)}} AS history
                FROM windrow.job j
                -- Compare with the queue's number as a parameter. If the statement joined the queue instead, Postgres
                -- would not know that there is only one queue, and would sort all of its jobs.
                WHERE j.queue_id = %(queue_id)s AND (%(kind)s = '' OR j.kind = %(kind)s)
                    AND j.id >= %(from_id)s::uuid AND j.id < %(before_id)s::uuid
                    AND (j.priority, j.visible_at, j.id)
                        > (
                            %(after_priority)s::smallint,
                            CASE
                                WHEN %(after_us)s::bigint < extract(epoch FROM timestamptz '9999-12-31') * 1000000
                                    THEN timestamptz 'epoch' + %(after_us)s * interval '1 us'
                                ELSE 'infinity'
                            END,
                            %(after_id)s::uuid
                        )
                    AND CASE %(state)s::text
                        WHEN 'ready' THEN {{is_due(j)}}
                        WHEN 'blocked' THEN {{is_blocked(j)}}
                        WHEN 'scheduled' THEN {{is_later(j)}} AND j.lease IS NULL
                        WHEN 'leased' THEN j.visible_at > now() AND j.lease IS NOT NULL
                    END
                ORDER BY j.priority, j.visible_at, j.id
                LIMIT %(rows)s
            )
            UNION ALL
            (
                SELECT
                    d.id, d.queue_id, {{answer_columns(d)}}, d.run_at, NULL, NULL, NULL, d.history
                FROM windrow.departing d
                WHERE d.slot = %(slot)s::smallint AND d.queue_id = %(queue_id)s AND d.reason IS NULL
                    AND (%(kind)s = '' OR d.kind = %(kind)s) AND d.id >= %(from_id)s::uuid AND d.id < %(before_id)s::uuid
                    AND (d.priority, d.run_at, d.id)
                        > (%(after_priority)s::smallint, timestamptz 'epoch' + %(after_us)s * interval '1 us', %(after_id)s::uuid)
                    AND CASE %(state)s::text
                        WHEN 'ready' THEN d.run_at <= now()
                        WHEN 'blocked' THEN {{is_blocked(d)}}
                        WHEN 'scheduled' THEN d.run_at > now() AND d.run_at < 'infinity'
                        ELSE false
                    END
                ORDER BY d.priority, d.run_at, d.id
                LIMIT %(rows)s
            )
        ) f
        JOIN windrow.queue q ON q.queue_id = f.queue_id
        WHERE q.org = %(org)s
        ORDER BY f.priority, f.visible_at, f.id
        LIMIT %(rows)s
    ) l
) p
WHERE coalesce(p.bytes_before, 0) < %(bytes_max)s
ORDER BY p.priority, p.visible_at, p.id
