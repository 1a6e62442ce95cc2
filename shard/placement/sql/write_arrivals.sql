-- Appends, on this shard, ends of nodes that another shard has appended. Returns the workflows of these nodes, for
-- fold_workflows.sql.
WITH appended AS (
    INSERT INTO windrow.workflow_arrival AS a (org_id, workflow, node, how)
    SELECT o.org_id, n.workflow, n.node, n.how
    FROM unnest(%(orgs)s::text[], %(workflows)s::uuid[], %(nodes)s::integer[], %(hows)s::text[])
        WITH ORDINALITY AS n (org, workflow, node, how, turn)
    CROSS JOIN LATERAL (SELECT o.org_id FROM windrow.org o WHERE o.org = n.org OFFSET 0) o
    ORDER BY n.turn
    RETURNING a.org_id, a.workflow
)
SELECT DISTINCT a.org_id, a.workflow::text FROM appended a
