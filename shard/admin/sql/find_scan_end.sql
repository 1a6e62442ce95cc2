-- Returns an id so that, from it to before_id, each table has about `rows` jobs of the org, or fewer. No row: each has no
-- more from from_id on. A search by conditions reads this range next. No job of the range finished before `since`. The
-- statement is planned for each run, so that only partitions since then are read.
SELECT t.id::text
FROM (
    (
        SELECT j.id
        FROM windrow.job j
        WHERE {{org_of(j)}} = %(org_id)s::bigint AND (%(queue)s = '' OR j.queue_id = ANY (%(queue_ids)s::bigint[]))
            AND j.id >= %(from_id)s::uuid AND j.id < %(before_id)s::uuid
            AND %(states)s::text[] && '{blocked,scheduled,ready,leased}'
            -- The jobs of a small org are found by its queues, and not among those of all orgs.
            AND %(rows)s < (
                SELECT count(*)
                FROM (
                    SELECT FROM windrow.job f WHERE f.queue_id = ANY (%(queue_ids)s::bigint[]) LIMIT %(rows)s + 1
                ) few
            )
        ORDER BY j.id DESC
        OFFSET %(rows)s
        LIMIT 1
    )
    UNION ALL
    (
        SELECT d.id
        FROM windrow.dead d
        WHERE {{org_of(d)}} = %(org_id)s::bigint AND (%(queue)s = '' OR d.queue_id = ANY (%(queue_ids)s::bigint[]))
            AND d.id >= %(from_id)s::uuid AND d.id < %(before_id)s::uuid AND 'dead' = ANY (%(states)s::text[])
            AND %(rows)s < (
                SELECT count(*)
                FROM (
                    SELECT FROM windrow.dead f WHERE f.queue_id = ANY (%(queue_ids)s::bigint[]) LIMIT %(rows)s + 1
                ) few
            )
        ORDER BY d.id DESC
        OFFSET %(rows)s
        LIMIT 1
    )
    UNION ALL
    (
        SELECT h.id
        FROM windrow.finished h
        WHERE {{org_of(h)}} = %(org_id)s::bigint AND h.id >= %(from_id)s::uuid AND h.id < %(before_id)s::uuid
            AND h.finished_at >= %(since)s
            AND %(states)s::text[] && '{succeeded,cancelled}'
        ORDER BY h.id DESC
        OFFSET %(rows)s
        LIMIT 1
    )
    UNION ALL
    (
        SELECT c.id
        FROM windrow.cold c
        WHERE {{org_of(c)}} = %(org_id)s::bigint AND c.id >= %(from_id)s::uuid AND c.id < %(before_id)s::uuid
            AND c.finished_at >= %(since)s
            AND %(states)s::text[] && '{succeeded,cancelled}'
        ORDER BY c.id DESC
        OFFSET %(rows)s
        LIMIT 1
    )
) t
ORDER BY t.id DESC
LIMIT 1
