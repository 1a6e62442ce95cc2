-- Makes the target the writer of the slots of this move. The source is recorded as their former owner.
WITH due AS MATERIALIZED (
    SELECT p.slot
    FROM windrow.placement p
    WHERE p.slot = ANY (%(slots)s::smallint[]) AND p.epoch = %(epoch)s
        AND p.writes = ARRAY[%(source)s::text] AND p.reads = ARRAY[%(source)s::text, %(target)s::text]
    ORDER BY p.slot
    FOR UPDATE
), next AS (
    UPDATE windrow.catalog c SET epoch = c.epoch + 1 WHERE EXISTS (SELECT FROM due) RETURNING c.epoch
), former AS (
    INSERT INTO windrow.former_owner (slot, shard, left_at)
    SELECT due.slot, %(source)s, now() FROM due
    ON CONFLICT (slot, shard) DO UPDATE SET left_at = excluded.left_at
), changed AS (
    UPDATE windrow.placement p
    SET writes = ARRAY[%(target)s::text], changed = next.epoch
    FROM due, next
    WHERE p.slot = due.slot
    RETURNING p.slot
)
SELECT changed.slot FROM changed
-- All routers listen to this channel.
CROSS JOIN (SELECT pg_notify('windrow_catalog', next.epoch::text) FROM next) told
