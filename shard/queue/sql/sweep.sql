-- Returns what probe.sql returns, but searches from the beginning of time, so that it also finds jobs that committed
-- late (invariant I7). Most queues have jobs of one priority or no jobs. Therefore the statement steps from each lane
-- that has jobs to the next such lane, instead of looking into all nine lanes. Also returns whether other statements
-- may have work to do: those that fill group slots, fold workflows, move jobs that have aged, or sweep the quarantined
-- kinds.
SELECT now() AS now, array_agg(first.queue_id) AS queue_ids, array_agg(first.priority) AS priorities,
    array_agg(first.visible_at) AS visible_at, array_agg(first.gives_jobs) AS gives_jobs,
    EXISTS (
        SELECT FROM windrow.job j
        WHERE j.group_key IS NOT NULL AND j.group_slot IS NULL AND NOT isfinite(j.visible_at) AND isfinite(j.run_at)
    ) AS groups_wait,
    EXISTS (SELECT FROM windrow.workflow_arrival)
        OR EXISTS (SELECT FROM windrow.workflow_node n WHERE n.is_left) AS workflows_wait,
    EXISTS (
        SELECT FROM windrow.queue a
        WHERE a.queue_id = ANY (%(queue_ids)s::bigint[]) AND a.ageing_seconds IS NOT NULL
    ) AS ages,
    EXISTS (SELECT FROM windrow.quarantine) OR EXISTS (SELECT FROM windrow.crash)
        OR EXISTS (SELECT FROM windrow.job j WHERE {{is_set_aside(j)}}) AS quarantines
FROM (
    SELECT q.queue_id, j.priority, j.visible_at, w.gives_jobs
    FROM unnest(%(queue_ids)s::bigint[]) AS q (queue_id)
    -- OFFSET 0 makes Postgres find the queue by its id, as in claim.sql.
    CROSS JOIN LATERAL (
        SELECT {{gives_jobs(w)}} AS gives_jobs FROM windrow.queue w WHERE w.queue_id = q.queue_id OFFSET 0
    ) w
    CROSS JOIN LATERAL (
        WITH RECURSIVE lane AS (
            (
                SELECT j.priority, j.visible_at
                FROM windrow.job j
                WHERE j.queue_id = q.queue_id
                ORDER BY j.priority, j.visible_at
                LIMIT 1
            )
            UNION ALL
            SELECT next.priority, next.visible_at
            FROM lane
            CROSS JOIN LATERAL (
                SELECT j.priority, j.visible_at
                FROM windrow.job j
                WHERE j.queue_id = q.queue_id AND j.priority > lane.priority
                ORDER BY j.priority, j.visible_at
                LIMIT 1
            ) next
        )
        -- If a lane's first time is infinity, all its jobs wait for group slots, are blocked, or are set aside.
        SELECT lane.priority, lane.visible_at FROM lane WHERE lane.visible_at < 'infinity'
    ) j
) first
