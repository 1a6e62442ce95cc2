-- Returns the workflows of all orgs in these slots, with their nodes and edges, as rows in the text format of Postgres.
SELECT o.slot, o.org, w.workflow::text, nodes.rows::text, edges.rows::text
FROM unnest(%(slots)s::smallint[]) AS n (slot)
-- For OFFSET 0, see read_queues.sql.
CROSS JOIN LATERAL (SELECT o.org, o.org_id, o.slot FROM windrow.org o WHERE o.slot = n.slot OFFSET 0) o
CROSS JOIN LATERAL (SELECT t AS workflow, t.flow FROM windrow.workflow t WHERE t.org_id = o.org_id OFFSET 0) w
CROSS JOIN LATERAL (SELECT array_agg(t) AS rows FROM windrow.workflow_node t WHERE t.flow = w.flow OFFSET 0) nodes
CROSS JOIN LATERAL (SELECT array_agg(t) AS rows FROM windrow.workflow_edge t WHERE t.flow = w.flow OFFSET 0) edges
