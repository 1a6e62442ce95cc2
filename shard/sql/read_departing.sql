-- What has departed from these slots in this move, for each queue: the chunk's number, and the rows as text.
SELECT d.slot, d.chunk, q.org, q.queue, array_agg(d.job)::text AS jobs
FROM unnest(%(slots)s::smallint[]) AS n (slot)
-- OFFSET 0 fences: by slot and by number alone.
CROSS JOIN LATERAL (
    SELECT d AS job, d.slot, d.chunk, d.queue_id
    FROM windrow.departing d
    WHERE d.slot = n.slot AND d.epoch = %(epoch)s
    OFFSET 0
) d
CROSS JOIN LATERAL (SELECT q.org, q.queue FROM windrow.queue q WHERE q.queue_id = d.queue_id OFFSET 0) q
-- What is done elsewhere because of this must not be lost here: it is on the standby first. See find_known.sql.
WHERE (SELECT pg_logical_emit_message(true, 'windrow', '')) IS NOT NULL
GROUP BY d.slot, d.chunk, q.org, q.queue
ORDER BY d.slot
