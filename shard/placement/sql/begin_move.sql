-- Begins a move of slots that are at rest. Slots that have changed since the move was planned are left out. Returns the
-- move's epoch with each slot.
WITH due AS MATERIALIZED (
    SELECT p.slot
    FROM unnest(%(slots)s::smallint[], %(epochs)s::bigint[]) AS n (slot, epoch)
    JOIN windrow.placement p ON p.slot = n.slot
    WHERE p.epoch = n.epoch AND p.writes = ARRAY[%(source)s::text] AND p.reads = p.writes
    ORDER BY p.slot
    FOR UPDATE OF p
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
-- Every copy of the catalog listens for this.
CROSS JOIN (SELECT pg_notify('windrow_catalog', next.epoch::text) FROM next) told
