-- Begins a move of slots that are at rest, of those that are as they were when it was planned. Answers its epoch with each.
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
-- Heard by every copy of the catalog.
CROSS JOIN (SELECT pg_notify('windrow_catalog', next.epoch::text) FROM next) told
