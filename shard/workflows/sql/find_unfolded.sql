-- Returns workflows of this shard that have something to take in: ends that nobody has taken in, which is rare, and jobs
-- that could not be released or cancelled because they were locked, or were on another shard then.
(
    SELECT DISTINCT a.org_id, a.workflow::text
    FROM (SELECT a.org_id, a.workflow FROM windrow.workflow_arrival a ORDER BY a.number LIMIT %(rows)s) a
    CROSS JOIN LATERAL (SELECT o.slot FROM windrow.org o WHERE o.org_id = a.org_id OFFSET 0) o
    CROSS JOIN LATERAL (SELECT s.state FROM windrow.owned_slot s WHERE s.slot = o.slot OFFSET 0) s
    WHERE s.state = 'owned'
)
UNION
(
    SELECT w.org_id, w.id::text
    FROM (
        SELECT n.flow, n.job_id, n.state FROM windrow.workflow_node n WHERE n.state IN ('due', 'doomed') LIMIT %(rows)s
    ) n
    CROSS JOIN LATERAL (
        SELECT w.org_id, w.id, w.paused_at FROM windrow.workflow w WHERE w.flow = n.flow OFFSET 0
    ) w
    CROSS JOIN LATERAL (SELECT o.slot FROM windrow.org o WHERE o.org_id = w.org_id OFFSET 0) o
    CROSS JOIN LATERAL (SELECT s.state FROM windrow.owned_slot s WHERE s.slot = o.slot OFFSET 0) s
    CROSS JOIN LATERAL (
        SELECT FROM windrow.job j WHERE j.id = n.job_id AND {{org_of(j)}} = w.org_id AND {{is_blocked(j)}} OFFSET 0
    ) j
    WHERE s.state = 'owned' AND (n.state = 'doomed' OR w.paused_at IS NULL)
)
