-- Returns a page of an org's workflows with ids before `before`, the newest id first.
SELECT w.id::text, o.org, w.name, w.state, w.created_at, {{is_paused(w)}} AS paused, w.ended_at,
    w.nodes + w.added AS nodes, w.retry_of::text
FROM windrow.org o
CROSS JOIN LATERAL (
    SELECT w.*
    FROM windrow.workflow w
    WHERE w.org_id = o.org_id AND w.id < %(before)s::uuid AND (%(state)s = '' OR w.state = %(state)s)
    ORDER BY w.id DESC
    LIMIT %(rows)s
) w
WHERE o.org = %(org)s
ORDER BY w.id DESC
