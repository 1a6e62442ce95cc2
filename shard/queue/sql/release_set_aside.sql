-- Releases up to `rows` jobs that are set aside although their kinds are not quarantined. Steps in an index from one
-- kind that has jobs set aside to the next such kind. Returns the queue of each released job.
WITH RECURSIVE kind AS (
    (
        SELECT j.queue_id, j.kind
        FROM windrow.job j
        WHERE {{is_set_aside(j)}}
        ORDER BY j.queue_id, j.kind
        LIMIT 1
    )
    UNION ALL
    SELECT next.queue_id, next.kind
    FROM kind
    CROSS JOIN LATERAL (
        SELECT j.queue_id, j.kind
        FROM windrow.job j
        WHERE (j.queue_id, j.kind) > (kind.queue_id, kind.kind) AND {{is_set_aside(j)}}
        ORDER BY j.queue_id, j.kind
        LIMIT 1
    ) next
), free AS MATERIALIZED (
    -- MATERIALIZED makes Postgres run this CTE once, so that it locks no more rows than it releases.
    SELECT v.ctid
    FROM kind
    CROSS JOIN LATERAL (
        SELECT j.ctid
        FROM windrow.job j
        WHERE j.queue_id = kind.queue_id AND j.kind = kind.kind AND {{is_set_aside(j)}}
        ORDER BY j.run_at, j.id
        LIMIT %(rows)s
        FOR UPDATE SKIP LOCKED
    ) v
    WHERE NOT EXISTS (
        SELECT FROM windrow.quarantine k WHERE k.queue_id = kind.queue_id AND k.kind = kind.kind OFFSET 0
    )
    LIMIT %(rows)s
)
UPDATE windrow.job j
-- The new visible_at is never before now(), because claims do not look below the floor.
SET visible_at = greatest(j.run_at, now())
WHERE j.ctid = ANY (ARRAY(SELECT free.ctid FROM free))
RETURNING j.queue_id
