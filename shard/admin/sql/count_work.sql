-- Counts the work of one queue of an org or, if the org is NULL, of all orgs' queues with that name. The work consists
-- of the jobs that a consumer would get now, and of the leased jobs. Ready jobs of paused queues, jobs that wait for a
-- group slot, and jobs that are set aside do not count. The count stops at `jobs_max`. The statement steps in the ready
-- index from each lane that has jobs to the next lane. In that index, leased jobs are among the jobs that become
-- visible later. In each lane, the statement reads at most `later_max` jobs that become visible later, the earliest
-- first, because leases end soon.
SELECT count(*) FILTER (WHERE found.ready) AS ready, count(*) FILTER (WHERE NOT found.ready) AS leased
FROM (
    SELECT job.ready
    FROM (
        SELECT q.queue_id AS first, q.queue_id AS last
        FROM windrow.queue q
        WHERE q.org = %(org)s::text AND q.queue = %(queue)s::text
        UNION ALL
        -- The lower 32 bits of a queue's id are the number of its org, and the bits above are the number of its name.
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
        -- The recursion ends when the LIMIT is reached.
        SELECT lane.queue_id, lane.priority FROM lane LIMIT %(lanes_max)s::bigint
    ) lane
    -- OFFSET 0 makes Postgres find the queue by its id, as in claim.sql.
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
