-- Returns a workflow.
SELECT w.id::text, o.org, w.name, w.state, w.created_at, {{is_paused(w)}} AS paused, w.ended_at,
    w.nodes + w.added AS nodes, w.retry_of::text
FROM windrow.workflow w
JOIN windrow.org o ON o.org_id = w.org_id
WHERE o.org = %(org)s AND w.id = %(id)s::uuid
