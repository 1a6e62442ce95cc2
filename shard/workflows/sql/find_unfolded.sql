-- Visits workflows that may have to be folded, and returns the workflows that must be folded. Some of these have ends
-- that no fold has processed, which is rare. The others have jobs that a fold could not release or cancel, because the
-- jobs were locked or on another shard.
--
-- Visits up to `rows` workflows with ends, beginning after the workflow `after_workflow` of the org `after_org`. Also
-- visits up to `rows` workflows with nodes that wait to be released or cancelled, beginning after the workflow
-- `after_flow`. Steps from workflow to workflow in the indexes, with one lookup for each workflow. Also returns the
-- workflows that it visited last, which have the place `rows`. The next sweep begins after these workflows. Otherwise,
-- if many workflows are paused or move, sweeps would never reach the other workflows.
WITH RECURSIVE arrived AS (
    (
        SELECT 1 AS place, a.org_id, a.workflow
        FROM windrow.workflow_arrival a
        WHERE (a.org_id, a.workflow) > (%(after_org)s::integer, %(after_workflow)s::uuid)
        ORDER BY a.org_id, a.workflow
        LIMIT 1
    )
    UNION ALL
    SELECT b.place + 1, a.org_id, a.workflow
    FROM arrived b
    CROSS JOIN LATERAL (
        SELECT a.org_id, a.workflow
        FROM windrow.workflow_arrival a
        WHERE (a.org_id, a.workflow) > (b.org_id, b.workflow)
        ORDER BY a.org_id, a.workflow
        LIMIT 1
    ) a
    WHERE b.place < %(rows)s
), unfinished AS (
    (
        SELECT 1 AS place, n.flow
        FROM windrow.workflow_node n
        WHERE n.is_left AND n.flow > %(after_flow)s
        ORDER BY n.flow
        LIMIT 1
    )
    UNION ALL
    SELECT u.place + 1, n.flow
    FROM unfinished u
    CROSS JOIN LATERAL (
        SELECT n.flow
        FROM windrow.workflow_node n
        WHERE n.is_left AND n.flow > u.flow
        ORDER BY n.flow
        LIMIT 1
    ) n
    WHERE u.place < %(rows)s
), visited AS (
    SELECT a.place, NULL::bigint AS flow, a.org_id, a.workflow AS id, NULL::timestamptz AS paused_at FROM arrived a
    UNION ALL
    SELECT u.place, u.flow, w.org_id, w.id, w.paused_at
    FROM unfinished u
    LEFT JOIN LATERAL (
        SELECT w.org_id, w.id, w.paused_at FROM windrow.workflow w WHERE w.flow = u.flow OFFSET 0
    ) w ON true
)
SELECT f.*
FROM (
    SELECT
        v.place, v.flow, v.org_id, v.id::text,
        CASE
            WHEN s.state IS DISTINCT FROM 'owned' THEN false
            WHEN v.flow IS NULL THEN true
            ELSE EXISTS (
                SELECT
                FROM windrow.workflow_node n
                CROSS JOIN LATERAL (
                    SELECT
                    FROM windrow.job j
                    WHERE j.id = n.job_id AND {{org_of(j)}} = v.org_id AND {{is_blocked(j)}}
                    OFFSET 0
                ) j
                WHERE n.flow = v.flow AND n.is_left AND (n.state = 'doomed' OR v.paused_at IS NULL)
            )
        END AS is_unfolded
    FROM visited v
    LEFT JOIN LATERAL (SELECT o.slot FROM windrow.org o WHERE o.org_id = v.org_id OFFSET 0) o ON true
    LEFT JOIN LATERAL (SELECT s.state FROM windrow.owned_slot s WHERE s.slot = o.slot OFFSET 0) s ON true
    OFFSET 0
) f
WHERE f.is_unfolded OR f.place = %(rows)s
