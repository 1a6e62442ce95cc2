-- Returns the queues of these slots with their configurations. An org without queues has one row with NULLs.
SELECT o.slot, o.org, q.queue, q.listed, q.created_at, {{queue_settings(q)}}
FROM unnest(%(slots)s::smallint[]) AS n (slot)
-- OFFSET 0 makes the planner use only the indexes by slot and by org, never a scan of all orgs or queues.
CROSS JOIN LATERAL (SELECT o.org, o.slot FROM windrow.org o WHERE o.slot = n.slot OFFSET 0) o
LEFT JOIN LATERAL (SELECT q.* FROM windrow.queue q WHERE q.org = o.org OFFSET 0) q ON true
ORDER BY o.org, q.queue
