-- Finds the smallest `visible_at` of each lane of these queues, from the lane's floor on. This is the time at which the
-- lane's next job became or becomes visible. Leaves out jobs that wait for a group slot, are blocked or are set aside,
-- because they have no such time. Returns one row, with arrays of the lanes that have jobs. Takes no locks. Includes
-- queues that give no jobs, because their floors are needed too.
SELECT now() AS now, array_agg(first.queue_id) AS queue_ids, array_agg(first.priority) AS priorities,
    array_agg(first.visible_at) AS visible_at, array_agg(first.gives_jobs) AS gives_jobs,
    -- Only sweep.sql computes these values. In this statement they are always true.
    true AS groups_wait, true AS workflows_wait, true AS ages, true AS quarantines
FROM (
    SELECT q.queue_id, p.priority::smallint AS priority, j.visible_at, w.gives_jobs
    FROM unnest(%(queue_ids)s::bigint[]) WITH ORDINALITY AS q (queue_id, turn)
    -- OFFSET 0 makes Postgres find the queue by its id, as in claim.sql.
    CROSS JOIN LATERAL (
        SELECT {{gives_jobs(w)}} AS gives_jobs FROM windrow.queue w WHERE w.queue_id = q.queue_id OFFSET 0
    ) w
    CROSS JOIN generate_series(1, 9) AS p (priority)
    CROSS JOIN LATERAL (
        SELECT j.visible_at
        FROM windrow.job j
        WHERE j.queue_id = q.queue_id AND j.priority = p.priority
            AND j.visible_at >= timestamptz 'epoch'
                + (%(floors_us)s::bigint[])[(q.turn - 1) * 9 + p.priority] * interval '1 us'
            AND j.visible_at < 'infinity'
        ORDER BY j.visible_at
        LIMIT 1
    ) j
) first
