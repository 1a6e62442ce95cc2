-- Returns the quarantined kinds of all queues in these slots, as rows in the text format of Postgres.
SELECT o.slot, o.org, q.queue, array_agg(k.row)::text AS rows
FROM unnest(%(slots)s::smallint[]) AS n (slot)
-- For OFFSET 0, see read_queues.sql.
CROSS JOIN LATERAL (SELECT o.org, o.slot FROM windrow.org o WHERE o.slot = n.slot OFFSET 0) o
CROSS JOIN LATERAL (SELECT q.queue, q.queue_id FROM windrow.queue q WHERE q.org = o.org OFFSET 0) q
CROSS JOIN LATERAL (SELECT t AS row FROM windrow.quarantine t WHERE t.queue_id = q.queue_id OFFSET 0) k
GROUP BY o.slot, o.org, q.queue
