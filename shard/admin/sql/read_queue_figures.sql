-- Returns the figures of the largest queues from the last count of jobs, and one row without a name with the sums of
-- all other queues. The row with the most jobs comes first. A queue that does not exist any more, or whose org is being
-- erased (slot -1), has no name either.
SELECT
    CASE WHEN q.slot >= 0 THEN q.org END AS org,
    CASE WHEN q.slot >= 0 THEN q.queue END AS queue,
    f.scheduled, f.ready, f.leased, f.dead, f.oldest_ready_s
FROM windrow.queue_figures c
CROSS JOIN LATERAL jsonb_array_elements(c.figures) one
CROSS JOIN LATERAL (
    SELECT
        (one ->> 0)::bigint AS queue_id, (one ->> 1)::bigint AS scheduled, (one ->> 2)::bigint AS ready,
        (one ->> 3)::bigint AS leased, (one ->> 4)::bigint AS dead, (one ->> 5)::double precision AS oldest_ready_s
) f
-- OFFSET 0 makes Postgres do one lookup for each row of figures, and never a scan of all queues.
LEFT JOIN LATERAL (SELECT q.org, q.queue, q.slot FROM windrow.queue q WHERE q.queue_id = f.queue_id OFFSET 0) q ON true
ORDER BY f.scheduled + f.ready + f.leased + f.dead DESC, f.queue_id
