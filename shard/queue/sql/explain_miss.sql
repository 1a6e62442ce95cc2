-- Explains the leases that a call did not find when it was to settle or extend them: how each lease ended (`ended_as`),
-- whether its job is known, and whether the job was cancelled. If the answer of a call was lost, and the caller repeats
-- the call, `ended_as` shows that the repeated call must get OK.
WITH cold AS MATERIALIZED (
    SELECT c.*
    FROM windrow.find_cold(
        %(ids)s::uuid[], least(to_timestamp(%(oldest_ms)s / 1000.0), now()) - interval '2 hours', NULL
    ) c
)
SELECT found.ended_as, found.id IS NOT NULL AS known, coalesce(found.state = 'cancelled', false) AS cancelled
FROM unnest(%(ids)s::uuid[], %(leases)s::bigint[], %(org_positions)s::smallint[])
    WITH ORDINALITY AS m (id, lease, org_position, place)
LEFT JOIN LATERAL (
    SELECT
        f.id, f.state,
        CASE
            WHEN f.lease = m.lease AND f.state = 'succeeded' THEN 'acked'
            ELSE windrow.outcome_of(f.history, m.lease)
        END AS ended_as
    FROM windrow.finished f
    WHERE f.id = m.id AND {{org_of(f)}} = {{org_id_of(m)}}
        AND f.finished_at >= least(to_timestamp(%(oldest_ms)s / 1000.0), now()) - interval '2 hours'
    UNION ALL
    SELECT j.id, NULL, windrow.outcome_of(j.history, m.lease)
    FROM windrow.job j
    WHERE j.id = m.id AND {{org_of(j)}} = {{org_id_of(m)}}
    UNION ALL
    SELECT d.id, NULL, windrow.outcome_of(d.history, m.lease)
    FROM windrow.dead d
    WHERE d.id = m.id AND {{org_of(d)}} = {{org_id_of(m)}}
    UNION ALL
    SELECT d.id, NULL, windrow.outcome_of(d.history, m.lease)
    FROM windrow.departing d
    WHERE d.id = m.id AND {{org_of(d)}} = {{org_id_of(m)}}
    UNION ALL
    SELECT
        c.id, c.state,
        CASE
            WHEN c.lease = m.lease AND c.state = 'succeeded' THEN 'acked'
            ELSE windrow.outcome_of(c.history, m.lease)
        END
    FROM cold c
    WHERE c.id = m.id AND {{org_of(c)}} = {{org_id_of(m)}}
    LIMIT 1
) found ON true
-- The commit that ended the lease may not be on the standby yet: see find_known.sql.
WHERE (SELECT pg_logical_emit_message(true, 'windrow', '')) IS NOT NULL
ORDER BY m.place
