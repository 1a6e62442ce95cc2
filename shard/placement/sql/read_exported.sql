-- Returns the jobs that were exported from these slots in this move. Each queue has one row, with the chunk's number
-- and the jobs' rows as text.
SELECT d.slot, d.chunk, q.org, q.queue, array_agg(d.job)::text AS jobs
FROM unnest(%(slots)s::smallint[]) AS n (slot)
-- OFFSET 0 makes the planner use only the indexes by slot and by queue id.
CROSS JOIN LATERAL (
    SELECT d AS job, d.slot, d.chunk, d.queue_id
    FROM windrow.departing d
    WHERE d.slot = n.slot AND d.epoch = %(epoch)s
    OFFSET 0
) d
CROSS JOIN LATERAL (SELECT q.org, q.queue FROM windrow.queue q WHERE q.queue_id = d.queue_id OFFSET 0) q
-- Other shards act on this answer, so it must survive a failover. The emitted message makes the commit wait for the
-- standby: see find_known.sql.
WHERE (SELECT pg_logical_emit_message(true, 'windrow', '')) IS NOT NULL
GROUP BY d.slot, d.chunk, q.org, q.queue
ORDER BY d.slot
