-- Finds the range of ids that a search by conditions reads next. The search goes from new ids to old ids. `newest` is
-- the upper end of the range, and `end_id` the lower end. In this range each table has at most about `rows` jobs of the
-- org. `end_id` is NULL if no table has more than `rows` jobs of the org whose ids are at least `from_id`. `newest` is
-- NULL if no table has a job of the org. Other orgs may have millions of jobs between `from_id` and `before_id`. The
-- search reads only the range that this statement finds, and so skips most of those jobs. No job of the range finished
-- before the time `since`. The statement is planned for each run, so that Postgres reads only the partitions from
-- `since` on.
WITH part AS (
    SELECT
        CASE
            -- If these queues have at most `rows` live jobs, search by queue, and not among the jobs of all orgs.
            WHEN %(rows)s >= (
                SELECT count(*)
                FROM (
                    SELECT FROM windrow.job f WHERE f.queue_id = ANY (%(queue_ids)s::bigint[]) LIMIT %(rows)s + 1
                ) few
            ) THEN ARRAY(
                SELECT few.id
                FROM (SELECT f.id FROM windrow.job f WHERE f.queue_id = ANY (%(queue_ids)s::bigint[]) OFFSET 0) few
                WHERE few.id >= %(from_id)s::uuid AND few.id < %(before_id)s::uuid
                ORDER BY few.id DESC
                LIMIT 1
            )
            ELSE ARRAY(
                SELECT j.id
                FROM windrow.job j
                WHERE {{org_of(j)}} = %(org_id)s::bigint
                    AND (%(queue)s = '' OR j.queue_id = ANY (%(queue_ids)s::bigint[]))
                    AND j.id >= %(from_id)s::uuid AND j.id < %(before_id)s::uuid
                ORDER BY j.id DESC
                LIMIT %(rows)s + 1
            )
        END AS ids
    WHERE %(states)s::text[] && '{blocked,scheduled,ready,leased}'
    UNION ALL
    SELECT
        CASE
            WHEN %(rows)s >= (
                SELECT count(*)
                FROM (
                    SELECT FROM windrow.dead f WHERE f.queue_id = ANY (%(queue_ids)s::bigint[]) LIMIT %(rows)s + 1
                ) few
            ) THEN ARRAY(
                SELECT few.id
                FROM (SELECT f.id FROM windrow.dead f WHERE f.queue_id = ANY (%(queue_ids)s::bigint[]) OFFSET 0) few
                WHERE few.id >= %(from_id)s::uuid AND few.id < %(before_id)s::uuid
                ORDER BY few.id DESC
                LIMIT 1
            )
            ELSE ARRAY(
                SELECT d.id
                FROM windrow.dead d
                WHERE {{org_of(d)}} = %(org_id)s::bigint
                    AND (%(queue)s = '' OR d.queue_id = ANY (%(queue_ids)s::bigint[]))
                    AND d.id >= %(from_id)s::uuid AND d.id < %(before_id)s::uuid
                ORDER BY d.id DESC
                LIMIT %(rows)s + 1
            )
        END
    WHERE 'dead' = ANY (%(states)s::text[])
    UNION ALL
    SELECT ARRAY(
        SELECT g.id
        FROM windrow.departing g
        WHERE g.slot = %(slot)s::smallint AND g.queue_id = ANY (%(queue_ids)s::bigint[])
            AND g.id >= %(from_id)s::uuid AND g.id < %(before_id)s::uuid
        ORDER BY g.id DESC
        LIMIT 1
    )
    UNION ALL
    SELECT ARRAY(
        SELECT h.id
        FROM windrow.finished h
        WHERE {{org_of(h)}} = %(org_id)s::bigint AND h.id >= %(from_id)s::uuid AND h.id < %(before_id)s::uuid
            AND h.finished_at >= %(since)s
        ORDER BY h.id DESC
        LIMIT %(rows)s + 1
    )
    WHERE %(states)s::text[] && '{succeeded,cancelled}'
    UNION ALL
    SELECT ARRAY(
        SELECT c.id
        FROM windrow.cold c
        WHERE {{org_of(c)}} = %(org_id)s::bigint AND c.id >= %(from_id)s::uuid AND c.id < %(before_id)s::uuid
            AND c.finished_at >= %(since)s
        ORDER BY c.id DESC
        LIMIT %(rows)s + 1
    )
    WHERE %(states)s::text[] && '{succeeded,cancelled}'
)
SELECT
    (SELECT p.ids[%(rows)s + 1]::text FROM part p WHERE p.ids[%(rows)s + 1] IS NOT NULL ORDER BY p.ids[%(rows)s + 1] DESC LIMIT 1)
        AS end_id,
    (SELECT p.ids[1]::text FROM part p WHERE p.ids[1] IS NOT NULL ORDER BY p.ids[1] DESC LIMIT 1) AS newest
