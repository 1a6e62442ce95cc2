-- Counts the work of one queue of an org, or (org NULL) of all orgs' queues of that name: jobs that a consumer would get
-- now, and jobs that are leased. Leaves out ready jobs of paused queues, which give no jobs, and jobs that wait for a
-- group slot. Stops at `jobs_max`. Steps in the ready index from each lane that has jobs to the next one. Leased jobs
-- stand among the jobs that are due later. It reads at most `later_max` of these in each lane, the earliest first,
-- because leases end soon.
SELECT count(*) FILTER (WHERE found.ready) AS ready, count(*) FILTER (WHERE NOT found.ready) AS leased
FROM (
    SELECT job.ready
    FROM (
        SELECT q.queue_id AS first, q.queue_id AS last
        FROM windrow.queue q
        WHERE q.org = %(org)s::text AND q.queue = %(queue)s::text
        UNION ALL
        -- A queue's id is 32 bits of its org, and above them its name.
        SELECT n.name_id::bigint << 32, ((n.name_id::bigint + 1) << 32) - 1
        FROM windrow.queue_name n
        WHERE %(org)s::text IS NULL AND n.queue = %(queue)s::text
    ) ids
    CROSS JOIN LATERAL (
        WITH RECURSIVE lane AS (
            (
                SELECT j.queue_id, j.priority
                FROM windrow.job j
                WHERE j.queue_id BETWEEN ids.first AND ids.last
                ORDER BY j.queue_id, j.priority
                LIMIT 1
            )
            UNION ALL
            SELECT next.queue_id, next.priority
            FROM lane
            CROSS JOIN LATERAL (
                SELECT j.queue_id, j.priority
                FROM windrow.job j
                WHERE (j.queue_id, j.priority) > (lane.queue_id, lane.priority) AND j.queue_id <= ids.last
                ORDER BY j.queue_id, j.priority
                LIMIT 1
            ) next
        )
        -- The recursion ends with the last row that is asked for.
        SELECT lane.queue_id, lane.priority FROM lane LIMIT %(lanes_max)s::bigint
    ) lane
    -- OFFSET 0 fence: finds the queue by its id, as in claim.sql.
    CROSS JOIN LATERAL (
        SELECT {{gives_jobs(w)}} AS gives_jobs FROM windrow.queue w WHERE w.queue_id = lane.queue_id OFFSET 0
    ) w
    CROSS JOIN LATERAL (
        SELECT true AS ready
        FROM windrow.job j
        WHERE w.gives_jobs AND j.queue_id = lane.queue_id AND j.priority = lane.priority AND j.visible_at <= now()
        UNION ALL
        SELECT false AS ready
        FROM (
            SELECT j.lease
            FROM windrow.job j
            WHERE j.queue_id = lane.queue_id AND j.priority = lane.priority AND {{is_later(j)}}
            ORDER BY j.visible_at
            LIMIT %(later_max)s::bigint
        ) later
        WHERE later.lease IS NOT NULL
    ) job
    LIMIT %(jobs_max)s::bigint
) found
