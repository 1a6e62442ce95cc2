-- Returns the nodes of a workflow that have one of these names.
SELECT n.name, n.node, n.job_id::text, n.state, n.callback IS NOT NULL AS is_callback, n.added_by
FROM windrow.org o
JOIN windrow.workflow w ON w.org_id = o.org_id AND w.id = %(id)s::uuid
CROSS JOIN unnest(%(names)s::text[]) AS x (name)
-- OFFSET 0 makes Postgres look up the names one after another.
CROSS JOIN LATERAL (
    SELECT n.* FROM windrow.workflow_node n WHERE n.flow = w.flow AND n.name = x.name OFFSET 0
) n
WHERE o.org = %(org)s
