-- Finds what is wrong with workflows, in one snapshot: blocked jobs that nothing will release, nodes that wait for the
-- wrong node or for each other, nodes whose job is missing, workflows that have recorded a wrong node as their last
-- open node, jobs that wait for a signal and would run, and ends that were not folded. Leaves out orgs that move,
-- because their jobs may be on the other shard. Also leaves out work that remains for the next fold: nodes for which
-- the end of a parent was not processed yet, and ends of jobs that a fold itself has ended.
WITH RECURSIVE settled AS MATERIALIZED (
    SELECT o.org_id, o.org
    FROM windrow.org o
    JOIN windrow.owned_slot s ON s.slot = o.slot AND s.state = 'owned' AND NOT s.arriving
), blocked AS (
    SELECT j.org, j.workflow, j.node, n.state
    FROM (
        SELECT o.org_id, o.org, j.id, left(j.workflow_node, 36) AS workflow, substr(j.workflow_node, 38)::integer AS node
        FROM windrow.job j
        JOIN settled o ON o.org_id = {{org_of(j)}}
        WHERE {{is_blocked(j)}}
    ) j
    -- OFFSET 0 makes Postgres look up one node for each job. Otherwise, without statistics, Postgres would read all
    -- nodes of the workflow for each job.
    LEFT JOIN LATERAL (
        SELECT w.flow FROM windrow.workflow w WHERE w.org_id = j.org_id AND w.id = j.workflow::uuid OFFSET 0
    ) w ON true
    LEFT JOIN LATERAL (
        SELECT n.state, n.job_id FROM windrow.workflow_node n WHERE n.flow = w.flow AND n.node = j.node OFFSET 0
    ) n ON n.job_id = j.id
), waiting AS (
    SELECT
        o.org_id, o.org, w.flow, w.id::text AS workflow, n.node, n.state, n.job_id, n.waits_on,
        p.ended_at IS NOT NULL AS parent_ended,
        (
            SELECT max(e.parent)
            FROM windrow.workflow_edge e
            JOIN windrow.workflow_node q ON q.flow = e.flow AND q.node = e.parent
            WHERE e.flow = n.flow AND e.node = n.node AND q.ended_at IS NULL
        ) AS last_open,
        EXISTS (
            SELECT FROM windrow.job j WHERE j.id = n.job_id AND {{org_of(j)}} = o.org_id AND {{is_blocked(j)}}
        ) AS has_job
    FROM settled o
    JOIN windrow.workflow w ON w.org_id = o.org_id
    JOIN windrow.workflow_node n ON n.flow = w.flow AND n.state = 'blocked'
    LEFT JOIN windrow.workflow_node p ON p.flow = n.flow AND p.node = n.waits_on
), chain AS (
    -- Begins at each node that waits for a node with a greater number, because each cycle has such a node. From there,
    -- goes to the node for which this node waits, then to the node for which that node waits, and so on.
    SELECT w.flow, w.node AS first, w.waits_on AS node
    FROM waiting w
    WHERE w.waits_on > w.node
    UNION
    SELECT c.flow, c.first, n.waits_on
    FROM chain c
    CROSS JOIN LATERAL (
        SELECT n.waits_on
        FROM windrow.workflow_node n
        WHERE n.flow = c.flow AND n.node = c.node AND n.state = 'blocked' AND n.waits_on IS NOT NULL
        OFFSET 0
    ) n
    WHERE c.node <> c.first
)
SELECT f.org, f.workflow, f.node, f.what
FROM (
    SELECT b.org, b.workflow, b.node, 'its job is blocked, and nothing will release it' AS what
    FROM blocked b
    WHERE b.state IS NULL OR b.state NOT IN ('blocked', 'due', 'doomed')
    UNION ALL
    SELECT w.org, w.workflow, w.node, 'it waits for node ' || w.waits_on || ', which has ended'
    FROM waiting w
    WHERE w.parent_ended AND NOT EXISTS (
        SELECT FROM windrow.workflow_arrival a
        WHERE a.org_id = w.org_id AND a.workflow = w.workflow::uuid AND a.node = w.waits_on
    )
    UNION ALL
    SELECT w.org, w.workflow, w.node, 'it waits for node ' || w.waits_on || ' instead of ' || coalesce(w.last_open::text, 'none')
    FROM waiting w
    WHERE w.waits_on IS DISTINCT FROM w.last_open AND NOT w.parent_ended
    UNION ALL
    SELECT w.org, w.workflow, w.node, 'it waits for nodes that wait for it'
    FROM waiting w
    JOIN chain c ON c.flow = w.flow AND c.first = w.node AND c.node = w.node
    UNION ALL
    SELECT w.org, w.workflow, w.node, 'it is blocked, and its job is not'
    FROM waiting w
    WHERE NOT w.has_job
    UNION ALL
    SELECT
        o.org, w.id::text, -1,
        'it is ' || w.state || ', and ' || coalesce('node ' || n.last_open || ' has not ended', 'all nodes have ended')
    FROM settled o
    JOIN windrow.workflow w ON w.org_id = o.org_id
    CROSS JOIN LATERAL (
        SELECT max(n.node) AS last_open
        FROM windrow.workflow_node n
        WHERE n.flow = w.flow AND n.callback IS NULL AND n.ended_at IS NULL
    ) n
    WHERE w.open_node IS DISTINCT FROM n.last_open
    UNION ALL
    SELECT o.org, a.workflow::text, a.node, 'its job has ended, and no fold has processed that'
    FROM settled o
    JOIN windrow.workflow_arrival a ON a.org_id = o.org_id
    LEFT JOIN LATERAL (
        SELECT w.flow FROM windrow.workflow w WHERE w.org_id = a.org_id AND w.id = a.workflow OFFSET 0
    ) w ON true
    LEFT JOIN LATERAL (
        SELECT n.ended_at, n.state, n.is_signal
        FROM windrow.workflow_node n
        WHERE n.flow = w.flow AND n.node = a.node
        OFFSET 0
    ) n ON true
    WHERE n.ended_at IS NULL AND (n.state = 'doomed' OR n.state = 'due' AND n.is_signal) IS NOT TRUE
    UNION ALL
    SELECT o.org, w.id::text, n.node, 'it was released, and its job is nowhere to be found'
    FROM settled o
    JOIN windrow.workflow w ON w.org_id = o.org_id
    JOIN windrow.workflow_node n ON n.flow = w.flow AND n.state = 'released'
    WHERE NOT EXISTS (SELECT FROM windrow.job j WHERE j.id = n.job_id AND {{org_of(j)}} = o.org_id)
    UNION ALL
    SELECT o.org, w.id::text, n.node, 'it waits for a signal, and its job would run'
    FROM settled o
    JOIN windrow.workflow w ON w.org_id = o.org_id
    JOIN windrow.workflow_node n ON n.flow = w.flow AND n.state = 'released' AND n.is_signal
    WHERE EXISTS (
        SELECT
        FROM windrow.job j
        WHERE j.id = n.job_id AND {{org_of(j)}} = o.org_id AND (j.visible_at >= j.expires_at) IS NOT TRUE
    )
) f
ORDER BY f.org, f.workflow, f.node
LIMIT %(rows)s
