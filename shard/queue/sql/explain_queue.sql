-- Returns what a queue would give now: its first ready jobs, its next jobs, and which consumers were seen. No row: the
-- org has no such queue on this shard.
--
-- Reads at most jobs_max ready jobs, and at most next_max jobs of each priority that become visible later. Jobs that
-- become visible later are scheduled, or leased until that time. If next_max of them are leased, the next scheduled job
-- may not be found.
SELECT
    now() AS now, {{gives_jobs(q)}} AS gives_jobs, ready.jobs AS ready, first.id::text AS first_id, first.kind AS first_kind,
    first.visible_at AS first_visible_at, waiting.jobs AS waiting, later.leased, later.first_deadline, later.next_due, later.complete,
    seen.any_at, seen.kind_at, seen.kinds
FROM windrow.queue q
CROSS JOIN LATERAL (
    SELECT count(*) AS jobs
    FROM (
        SELECT
        FROM generate_series(1, 9) AS p (priority)
        CROSS JOIN LATERAL (
            SELECT
            FROM windrow.job j
            WHERE j.queue_id = q.queue_id AND j.priority = p.priority::smallint
                AND j.visible_at >= timestamptz 'epoch' + (%(floors_us)s::bigint[])[p.priority] * interval '1 us'
                AND j.visible_at <= now()
            ORDER BY j.visible_at
            LIMIT %(jobs_max)s::bigint
        ) j
        LIMIT %(jobs_max)s::bigint
    ) counted
) ready
LEFT JOIN LATERAL (
    SELECT j.id, j.kind, j.visible_at
    FROM generate_series(1, 9) AS p (priority)
    CROSS JOIN LATERAL (
        SELECT j.id, j.kind, j.visible_at
        FROM windrow.job j
        WHERE j.queue_id = q.queue_id AND j.priority = p.priority::smallint
            AND j.visible_at >= timestamptz 'epoch' + (%(floors_us)s::bigint[])[p.priority] * interval '1 us'
            AND j.visible_at <= now()
        ORDER BY j.visible_at
        LIMIT 1
    ) j
    LIMIT 1
) first ON true
CROSS JOIN LATERAL (
    SELECT count(*) AS jobs
    FROM (
        SELECT
        FROM windrow.job j
        WHERE j.queue_id = q.queue_id AND j.group_key IS NOT NULL AND j.group_slot IS NULL AND NOT isfinite(j.visible_at)
            AND isfinite(j.run_at)
        LIMIT %(jobs_max)s::bigint
    ) counted
) waiting
CROSS JOIN LATERAL (
    SELECT
        count(*) FILTER (WHERE j.lease IS NOT NULL) AS leased,
        min(j.visible_at) FILTER (WHERE j.lease IS NOT NULL) AS first_deadline,
        min(j.visible_at) FILTER (WHERE j.lease IS NULL) AS next_due,
        coalesce(max(j.turn) < %(next_max)s::bigint, true) AS complete
    FROM generate_series(1, 9) AS p (priority)
    CROSS JOIN LATERAL (
        SELECT j.lease, j.visible_at, row_number() OVER (ORDER BY j.visible_at) AS turn
        FROM (
            SELECT j.lease, j.visible_at
            FROM windrow.job j
            WHERE j.queue_id = q.queue_id AND j.priority = p.priority::smallint AND {{is_later(j)}}
            ORDER BY j.visible_at
            LIMIT %(next_max)s::bigint
        ) j
    ) j
) later
CROSS JOIN LATERAL (
    SELECT
        max(s.at) AS any_at, max(s.at) FILTER (WHERE s.kind IN ('', first.kind)) AS kind_at,
        array_agg(s.kind ORDER BY s.kind) FILTER (WHERE s.at >= now() - %(seen_us)s::bigint * interval '1 us') AS kinds
    FROM windrow.consumer_seen s
    -- Includes the consumers that take jobs of all orgs: see record_consumers_of_all.sql.
    WHERE s.queue_id IN (q.queue_id, q.queue_id >> 32 << 32)
) seen
WHERE q.org = %(org)s AND q.queue = %(queue)s
    AND (
        q.listed OR ready.jobs > 0 OR waiting.jobs > 0 OR later.leased > 0 OR later.next_due IS NOT NULL
        OR EXISTS (SELECT FROM windrow.dead d WHERE d.queue_id = q.queue_id)
    )
