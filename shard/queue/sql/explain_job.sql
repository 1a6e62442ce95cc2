-- Returns what decides when a live job of this queue is leased: the job's own times, how many jobs come before it, and
-- which consumers were seen. No row: the org has no such queue on this shard. If visible_at is NULL, the job is not
-- live in this queue.
--
-- Counts at most jobs_max jobs that come before this job. The order is that of claims: by priority, then by visible_at.
-- Jobs with equal times have the order of the ready index. The count begins at each lane's floor, as a claim does.
SELECT
    -- For a job that waits for its group slot, or got its slot late, the returned visible_at is the time at which the
    -- job became due.
    now() AS now, CASE WHEN j.lease IS NULL THEN j.run_at ELSE j.visible_at END AS visible_at, j.lease IS NOT NULL AS leased, {{gives_jobs(q)}} AS gives_jobs,
    EXISTS (SELECT FROM windrow.departing d WHERE d.id = %(id)s::uuid AND d.queue_id = q.queue_id) AS departing,
    ahead.more_urgent, ahead.earlier,
    CASE WHEN j.priority > 1 THEN j.visible_at + (j.priority - 1) * q.ageing_seconds * interval '1 s' END AS goes_first_at,
    coalesce(j.visible_at = 'infinity' AND j.run_at < 'infinity', false) AS waits, seen.any_at, seen.kind_at, seen.kinds
FROM windrow.queue q
-- OFFSET 0 makes Postgres find the job by its id, never by a scan of its queue.
LEFT JOIN LATERAL (
    SELECT j.id, j.queue_id, j.priority, j.run_at, j.visible_at, j.lease, j.kind
    FROM windrow.job j
    WHERE j.id = %(id)s::uuid
    OFFSET 0
) j ON j.queue_id = q.queue_id
CROSS JOIN LATERAL (
    SELECT
        count(*) FILTER (WHERE a.priority < j.priority) AS more_urgent,
        count(*) FILTER (WHERE a.priority = j.priority) AS earlier
    FROM (
        SELECT p.priority
        FROM generate_series(1, j.priority - 1) AS p (priority)
        CROSS JOIN LATERAL (
            SELECT
            FROM windrow.job o
            WHERE o.queue_id = q.queue_id AND o.priority = p.priority::smallint
                AND o.visible_at >= timestamptz 'epoch' + (%(floors_us)s::bigint[])[p.priority] * interval '1 us'
                AND o.visible_at <= now()
            ORDER BY o.visible_at
            LIMIT %(jobs_max)s::bigint
        ) before
        UNION ALL
        SELECT j.priority
        FROM (
            SELECT
            FROM windrow.job o
            WHERE o.queue_id = q.queue_id AND o.priority = j.priority
                AND o.visible_at >= timestamptz 'epoch' + (%(floors_us)s::bigint[])[j.priority] * interval '1 us'
                AND o.visible_at < j.visible_at
            -- Count backwards from the job, so that the index entries of claimed jobs come last.
            ORDER BY o.visible_at DESC
            LIMIT %(jobs_max)s::bigint
        ) before
        UNION ALL
        SELECT j.priority
        FROM (
            SELECT bool_or(equal.id = j.id) OVER (ROWS UNBOUNDED PRECEDING) AS reached
            FROM (
                SELECT o.id
                FROM windrow.job o
                WHERE o.queue_id = q.queue_id AND o.priority = j.priority AND o.visible_at = j.visible_at
                ORDER BY o.visible_at
                LIMIT %(jobs_max)s::bigint
            ) equal
        ) beside
        WHERE NOT beside.reached
        LIMIT %(jobs_max)s::bigint
    ) a
    WHERE j.visible_at <= now()
) ahead
CROSS JOIN LATERAL (
    SELECT
        max(s.at) AS any_at, max(s.at) FILTER (WHERE s.kind IN ('', j.kind)) AS kind_at,
        array_agg(s.kind ORDER BY s.kind) FILTER (WHERE s.at >= now() - %(seen_us)s::bigint * interval '1 us') AS kinds
    FROM windrow.consumer_seen s
    -- Includes the consumers that take jobs of all orgs: see record_consumers_of_all.sql.
    WHERE s.queue_id IN (q.queue_id, q.queue_id >> 32 << 32)
) seen
WHERE q.org = %(org)s AND q.queue = %(queue)s
