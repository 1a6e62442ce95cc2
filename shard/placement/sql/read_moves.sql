-- Returns the slots that are in a move, grouped by move. Moves whose target is not the writer yet come first, because
-- perhaps no shard accepts new jobs of their slots.
SELECT
    p.epoch, p.reads[1] AS source, p.reads[2] AS target, p.writes = p.reads[2:2] AS switched,
    array_agg(p.slot ORDER BY p.slot) AS slots
FROM windrow.placement p
WHERE cardinality(p.reads) > 1
    -- Other shards act on this answer, so it must survive a failover. The emitted message makes the commit wait for the
    -- standby: see find_known.sql.
    AND (SELECT pg_logical_emit_message(true, 'windrow', '')) IS NOT NULL
GROUP BY p.epoch, p.reads, p.writes
ORDER BY switched, p.epoch
