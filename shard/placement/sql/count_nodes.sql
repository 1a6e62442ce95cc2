-- Counts, for each of these slots, the nodes of its workflows. Leaves out slots without workflows.
SELECT n.slot, sum(w.nodes)::bigint
FROM unnest(%(slots)s::smallint[]) AS n (slot)
-- For OFFSET 0, see read_queues.sql.
CROSS JOIN LATERAL (SELECT o.org_id FROM windrow.org o WHERE o.slot = n.slot OFFSET 0) o
CROSS JOIN LATERAL (SELECT w.nodes FROM windrow.workflow w WHERE w.org_id = o.org_id OFFSET 0) w
GROUP BY n.slot
