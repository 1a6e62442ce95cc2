-- Returns the live, dead and departing jobs of this shard whose ids are greater than `behind`, in the order of their
-- ids. A job that a consumer had leased counts as leased, even if its lease has expired. Returns NULL as the name of an
-- org that is being erased.
SELECT u.id::text, CASE WHEN q.slot >= 0 THEN q.org END AS org, q.queue, u.state
FROM (
    SELECT t.*
    FROM (
        (
            SELECT
                j.id, j.queue_id,
                CASE
                    WHEN j.lease IS NOT NULL THEN 'leased'
                    WHEN {{is_blocked(j)}} THEN 'blocked'
                    WHEN {{is_later(j)}} THEN 'scheduled'
                    ELSE 'ready'
                END AS state
            FROM windrow.job j
            WHERE j.id > %(behind)s::uuid
            ORDER BY j.id
            LIMIT %(rows)s
        )
        UNION ALL
        (
            SELECT d.id, d.queue_id, 'dead' FROM windrow.dead d WHERE d.id > %(behind)s::uuid ORDER BY d.id LIMIT %(rows)s
        )
        UNION ALL
        (
            SELECT
                d.id, d.queue_id,
                CASE
                    WHEN d.reason IS NOT NULL THEN 'dead'
                    WHEN {{is_blocked(d)}} THEN 'blocked'
                    WHEN d.run_at > now() THEN 'scheduled'
                    ELSE 'ready'
                END AS state
            FROM windrow.departing d
            WHERE d.id > %(behind)s::uuid
            ORDER BY d.id
            LIMIT %(rows)s
        )
    ) t
    ORDER BY t.id
    LIMIT %(rows)s
) u
JOIN windrow.queue q ON q.queue_id = u.queue_id
ORDER BY u.id
