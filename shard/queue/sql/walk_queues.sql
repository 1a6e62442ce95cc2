-- Returns the first `queues` queues that have live jobs and an id from `first` to `last`, ordered by id. The queues of
-- all orgs with one name are such a range of ids. Returns for each queue its org, whether it gives jobs, and the time
-- at which its first job became or becomes visible. Searches from the beginning of time, so that it also finds jobs
-- that committed late (invariant I7). Steps in the ready index from each queue to the next queue, and from each lane of
-- a queue to the next lane, as sweep.sql does. So the time that the statement takes does not depend on the number of
-- jobs.
SELECT now() AS now, head.queue_id, q.org, q.gives_jobs, first.visible_at
FROM (
    WITH RECURSIVE step AS (
        (
            SELECT j.queue_id
            FROM windrow.job j
            WHERE j.queue_id BETWEEN %(first)s::bigint AND %(last)s::bigint
            ORDER BY j.queue_id
            LIMIT 1
        )
        UNION ALL
        SELECT next.queue_id
        FROM step
        CROSS JOIN LATERAL (
            SELECT j.queue_id
            FROM windrow.job j
            WHERE j.queue_id > step.queue_id AND j.queue_id <= %(last)s::bigint
            ORDER BY j.queue_id
            LIMIT 1
        ) next
    )
    -- The recursion ends when the LIMIT is reached.
    SELECT step.queue_id FROM step LIMIT %(queues)s::bigint
) head
-- OFFSET 0 makes Postgres find the queue by its id, as in claim.sql.
LEFT JOIN LATERAL (
    SELECT q.org, {{gives_jobs(q)}} AS gives_jobs FROM windrow.queue q WHERE q.queue_id = head.queue_id OFFSET 0
) q ON true
CROSS JOIN LATERAL (
    WITH RECURSIVE lane AS (
        (
            SELECT j.priority, j.visible_at
            FROM windrow.job j
            WHERE j.queue_id = head.queue_id
            ORDER BY j.priority, j.visible_at
            LIMIT 1
        )
        UNION ALL
        SELECT next.priority, next.visible_at
        FROM lane
        CROSS JOIN LATERAL (
            SELECT j.priority, j.visible_at
            FROM windrow.job j
            WHERE j.queue_id = head.queue_id AND j.priority > lane.priority
            ORDER BY j.priority, j.visible_at
            LIMIT 1
        ) next
    )
    SELECT min(lane.visible_at) AS visible_at FROM lane
) first
