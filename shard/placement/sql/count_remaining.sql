-- Counts, for each of these slots, the unfinished jobs that remain on this shard: jobs that may be exported, leased
-- jobs, dead jobs, and exported jobs that are not deleted yet. Also counts the ends of nodes that no fold has
-- processed. Leaves out slots for which all of these numbers are 0.
SELECT n.slot, coalesce(there.free, 0), coalesce(there.leased, 0), coalesce(there.dead, 0), away.departing, ends.arrivals
FROM unnest(%(slots)s::smallint[]) AS n (slot)
CROSS JOIN LATERAL (
    SELECT sum(live.free)::bigint AS free, sum(live.leased)::bigint AS leased, sum(aside.dead)::bigint AS dead
    -- For OFFSET 0, see read_queues.sql.
    FROM (SELECT o.org FROM windrow.org o WHERE o.slot = n.slot OFFSET 0) o
    CROSS JOIN LATERAL (SELECT q.queue_id FROM windrow.queue q WHERE q.org = o.org OFFSET 0) q
    CROSS JOIN LATERAL (
        SELECT
            count(*) FILTER (WHERE j.lease IS NULL OR j.visible_at <= now()) AS free,
            count(*) FILTER (WHERE j.lease IS NOT NULL AND j.visible_at > now()) AS leased
        FROM windrow.job j
        WHERE j.queue_id = q.queue_id
    ) live
    CROSS JOIN LATERAL (SELECT count(*) AS dead FROM windrow.dead d WHERE d.queue_id = q.queue_id) aside
) there
CROSS JOIN LATERAL (SELECT count(*) AS departing FROM windrow.departing d WHERE d.slot = n.slot) away
CROSS JOIN LATERAL (
    SELECT count(*) AS arrivals
    FROM (SELECT o.org_id FROM windrow.org o WHERE o.slot = n.slot OFFSET 0) o
    CROSS JOIN LATERAL (SELECT FROM windrow.workflow_arrival a WHERE a.org_id = o.org_id OFFSET 0) a
) ends
WHERE (there.free > 0 OR there.leased > 0 OR there.dead > 0 OR away.departing > 0 OR ends.arrivals > 0)
    -- Other shards act on this answer, so it must survive a failover. The emitted message makes the commit wait for the
    -- standby: see find_known.sql.
    AND (SELECT pg_logical_emit_message(true, 'windrow', '')) IS NOT NULL
ORDER BY n.slot
