-- Returns the jobs of a workflow that were released and have not ended, without callbacks.
SELECT n.job_id::text
FROM windrow.org o
JOIN windrow.workflow w ON w.org_id = o.org_id AND w.id = %(id)s::uuid
CROSS JOIN LATERAL (
    SELECT n.job_id
    FROM windrow.workflow_node n
    WHERE n.flow = w.flow AND n.callback IS NULL AND n.state IN ('released', 'doomed')
    ORDER BY n.node
    OFFSET 0
) n
WHERE o.org = %(org)s
