-- From now on the target writes the slots of this move. The source is remembered as their owner until now.
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
)
UPDATE windrow.placement p
SET writes = ARRAY[%(target)s::text]
FROM due, next
WHERE p.slot = due.slot
RETURNING p.slot
