-- Deletes the exported jobs of these chunks of one move. Run this statement after the other shard has stored these
-- jobs. Returns how many jobs were deleted.
WITH forgotten AS (
    DELETE FROM windrow.departing d
    WHERE d.ctid = ANY (ARRAY(
        SELECT d.ctid
        FROM unnest(%(slots)s::smallint[], %(chunks)s::integer[]) AS n (slot, chunk)
        -- OFFSET 0 makes the planner use only the index by slot.
        CROSS JOIN LATERAL (SELECT d.ctid, d.epoch, d.chunk FROM windrow.departing d WHERE d.slot = n.slot OFFSET 0) d
        WHERE d.epoch = %(epoch)s AND d.chunk = n.chunk
    ))
    RETURNING d.queue_id
), counted AS (
    INSERT INTO windrow.tally (org_id, accepted)
    SELECT ({{org_of(f)}})::integer, -count(*) FROM forgotten f GROUP BY 1
)
SELECT count(*) FROM forgotten
