-- Begins a move of slots that are on the source and do not move yet. Leaves out slots that have changed since the move
-- was planned. Returns each slot of the move, with the move's epoch.
WITH due AS MATERIALIZED (
    SELECT p.slot
    FROM windrow.placement p
    WHERE p.writes = ARRAY[%(source)s::text] AND p.reads = p.writes
        -- IS TRUE prevents the planner from turning the IN into a join. After earlier moves, the statistics of the
        -- columns `writes` and `reads` are wrong. Then such a join compared each slot with every other slot, which took
        -- 0.9 s for a third of the slots.
        AND ((p.slot, p.epoch) IN (
            SELECT n.slot, n.epoch FROM unnest(%(slots)s::smallint[], %(epochs)s::bigint[]) AS n (slot, epoch)
        )) IS TRUE
    ORDER BY p.slot
    FOR UPDATE
), next AS (
    UPDATE windrow.catalog c SET epoch = c.epoch + 1 WHERE EXISTS (SELECT FROM due) RETURNING c.epoch
), changed AS (
    UPDATE windrow.placement p
    SET reads = ARRAY[%(source)s::text, %(target)s::text], epoch = next.epoch, changed = next.epoch
    FROM due, next
    WHERE p.slot = due.slot
    RETURNING p.slot, p.epoch
)
SELECT changed.slot, changed.epoch FROM changed
-- All routers listen to this channel.
CROSS JOIN (SELECT pg_notify('windrow_catalog', next.epoch::text) FROM next) told
