-- Stores workflows that come with their orgs from another shard. On this shard, orgs and workflows have other numbers.
WITH given AS MATERIALIZED (
    SELECT o.org_id AS here, w.*, n.nodes AS node_rows, n.edges AS edge_rows
    FROM unnest(%(orgs)s::text[], %(workflows)s::text[], %(nodes)s::text[], %(edges)s::text[])
        AS n (org, workflow, nodes, edges)
    CROSS JOIN LATERAL (SELECT o.org_id FROM windrow.org o WHERE o.org = n.org OFFSET 0) o
    CROSS JOIN LATERAL (SELECT (n.workflow::windrow.workflow).*) w
), made AS (
    INSERT INTO windrow.workflow AS w (
        org_id, id, name, digest, created_at, nodes, open_node, paused_at, cancelled_at, reason, state, ended_at,
        retry_of, added
    )
    SELECT
        g.here, g.id, g.name, g.digest, g.created_at, g.nodes, g.open_node, g.paused_at, g.cancelled_at, g.reason, g.state,
        g.ended_at, g.retry_of, g.added
    FROM given g
    RETURNING w.flow, w.org_id, w.id
), placed AS MATERIALIZED (
    SELECT made.flow, g.node_rows, g.edge_rows FROM given g JOIN made ON made.org_id = g.here AND made.id = g.id
), node AS (
    INSERT INTO windrow.workflow_node (
        flow, node, name, job_id, callback, run_at, delay_us, waits_on, state, ended_at, added_by, is_signal
    )
    SELECT
        p.flow, d.node, d.name, d.job_id, d.callback, d.run_at, d.delay_us, d.waits_on, d.state, d.ended_at, d.added_by,
        d.is_signal
    FROM placed p
    CROSS JOIN LATERAL unnest(p.node_rows::windrow.workflow_node[]) d
)
INSERT INTO windrow.workflow_edge (flow, node, parent, on_failed)
SELECT p.flow, d.node, d.parent, d.on_failed
FROM placed p
CROSS JOIN LATERAL unnest(p.edge_rows::windrow.workflow_edge[]) d
