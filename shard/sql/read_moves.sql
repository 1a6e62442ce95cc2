-- The slots that are not at rest, by the move they are in. First those of which nobody may take jobs.
SELECT
    p.epoch, p.reads[1] AS source, p.reads[2] AS target, p.writes = p.reads[2:2] AS switched,
    array_agg(p.slot ORDER BY p.slot) AS slots
FROM windrow.placement p
WHERE cardinality(p.reads) > 1
    -- What is done elsewhere because of this must not be lost here: it is on the standby first. See find_known.sql.
    AND (SELECT pg_logical_emit_message(true, 'windrow', '')) IS NOT NULL
GROUP BY p.epoch, p.reads, p.writes
ORDER BY switched, p.epoch
