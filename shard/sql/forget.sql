-- Deletes what another shard has taken, by the move and by each slot's chunk. Answers how many jobs.
WITH forgotten AS (
    DELETE FROM windrow.departing d
    WHERE d.ctid = ANY (ARRAY(
        SELECT d.ctid
        FROM unnest(%(slots)s::smallint[], %(chunks)s::integer[]) AS n (slot, chunk)
        -- OFFSET 0 fence: by slot alone.
        CROSS JOIN LATERAL (SELECT d.ctid, d.epoch, d.chunk FROM windrow.departing d WHERE d.slot = n.slot OFFSET 0) d
        WHERE d.epoch = %(epoch)s AND d.chunk = n.chunk
    ))
    RETURNING d.queue_id
), counted AS (
    INSERT INTO windrow.tally (org_id, accepted)
    SELECT (f.queue_id & 4294967295)::integer, -count(*) FROM forgotten f GROUP BY 1
)
SELECT count(*) FROM forgotten
