-- Ends the move of these slots: from now on only the target is read. Run this statement when the source has no more
-- jobs of these slots.
WITH due AS MATERIALIZED (
    SELECT p.slot
    FROM windrow.placement p
    WHERE p.slot = ANY (%(slots)s::smallint[]) AND p.epoch = %(epoch)s
        AND p.writes = ARRAY[%(target)s::text] AND p.reads = ARRAY[%(source)s::text, %(target)s::text]
    ORDER BY p.slot
    FOR UPDATE
), next AS (
    UPDATE windrow.catalog c SET epoch = c.epoch + 1 WHERE EXISTS (SELECT FROM due) RETURNING c.epoch
), changed AS (
    UPDATE windrow.placement p
    SET reads = p.writes, changed = next.epoch
    FROM due, next
    WHERE p.slot = due.slot
    RETURNING p.slot
)
SELECT changed.slot FROM changed
-- All routers listen to this channel.
CROSS JOIN (SELECT pg_notify('windrow_catalog', next.epoch::text) FROM next) told
