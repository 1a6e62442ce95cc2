-- Returns the ends of nodes that were appended on this shard after it had closed these slots, the oldest first.
SELECT a.number, o.org, a.workflow::text, a.node, a.how
FROM unnest(%(slots)s::smallint[]) AS n (slot)
-- For OFFSET 0, see read_queues.sql.
CROSS JOIN LATERAL (
    SELECT s.slot FROM windrow.owned_slot s
    WHERE s.slot = n.slot AND s.state = 'draining' AND s.epoch = %(epoch)s
    OFFSET 0
) s
CROSS JOIN LATERAL (SELECT o.org, o.org_id FROM windrow.org o WHERE o.slot = s.slot OFFSET 0) o
CROSS JOIN LATERAL (SELECT a.* FROM windrow.workflow_arrival a WHERE a.org_id = o.org_id OFFSET 0) a
-- The target acts on this answer, so it must survive a failover: see read_exported.sql.
WHERE (SELECT pg_logical_emit_message(true, 'windrow', '')) IS NOT NULL
ORDER BY a.number
LIMIT 10000
