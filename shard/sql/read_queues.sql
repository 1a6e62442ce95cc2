-- The queues of these slots, configuration and all; an org that has none comes with NULLs.
SELECT o.slot, o.org, q.queue, q.paused, q.retry::text, q.max_attempts, q.retention, q.listed, q.created_at
FROM unnest(%(slots)s::smallint[]) AS n (slot)
-- OFFSET 0 fences: by slot and by name alone, never by a walk through all orgs or queues.
CROSS JOIN LATERAL (SELECT o.org, o.slot FROM windrow.org o WHERE o.slot = n.slot OFFSET 0) o
LEFT JOIN LATERAL (SELECT q.* FROM windrow.queue q WHERE q.org = o.org OFFSET 0) q ON true
ORDER BY o.org, q.queue
