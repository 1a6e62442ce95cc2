-- Returns up to `rows` workflows of this shard that must be folded. They have ends that nobody has taken in, which is
-- rare, or jobs that could not be released or cancelled because they were locked, or were on another shard.
--
-- Steps from workflow to workflow in the indexes, with one lookup for each workflow. So a workflow that is paused, or
-- that moves, does not hide other workflows, however many of its nodes wait.
WITH RECURSIVE arrived AS (
    (
        SELECT a.org_id, a.workflow FROM windrow.workflow_arrival a ORDER BY a.org_id, a.workflow LIMIT 1
    )
    UNION ALL
    SELECT a.org_id, a.workflow
    FROM arrived b
    CROSS JOIN LATERAL (
        SELECT a.org_id, a.workflow
        FROM windrow.workflow_arrival a
        WHERE (a.org_id, a.workflow) > (b.org_id, b.workflow)
        ORDER BY a.org_id, a.workflow
        LIMIT 1
    ) a
), unfinished AS (
    (
        SELECT n.flow FROM windrow.workflow_node n WHERE n.state IN ('due', 'doomed') ORDER BY n.flow LIMIT 1
    )
    UNION ALL
    SELECT n.flow
    FROM unfinished u
    CROSS JOIN LATERAL (
        SELECT n.flow
        FROM windrow.workflow_node n
        WHERE n.state IN ('due', 'doomed') AND n.flow > u.flow
        ORDER BY n.flow
        LIMIT 1
    ) n
)
SELECT f.org_id, f.workflow::text
FROM (
    SELECT a.org_id, a.workflow FROM arrived a
    UNION
    SELECT w.org_id, w.id
    FROM unfinished u
    CROSS JOIN LATERAL (
        SELECT w.org_id, w.id, w.paused_at FROM windrow.workflow w WHERE w.flow = u.flow OFFSET 0
    ) w
    CROSS JOIN LATERAL (
        SELECT
        FROM windrow.workflow_node n
        CROSS JOIN LATERAL (
            SELECT FROM windrow.job j WHERE j.id = n.job_id AND {{org_of(j)}} = w.org_id AND {{is_blocked(j)}} OFFSET 0
        ) j
        WHERE n.flow = u.flow AND n.state IN ('due', 'doomed') AND (n.state = 'doomed' OR w.paused_at IS NULL)
        LIMIT 1
    ) n
) f
CROSS JOIN LATERAL (SELECT o.slot FROM windrow.org o WHERE o.org_id = f.org_id OFFSET 0) o
CROSS JOIN LATERAL (SELECT s.state FROM windrow.owned_slot s WHERE s.slot = o.slot OFFSET 0) s
WHERE s.state = 'owned'
LIMIT %(rows)s
