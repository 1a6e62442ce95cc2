-- Gives an org a slot of its own, on the shard of its hash slot. Former owners of the hash slot become former owners of
-- the new slot, because they may know jobs of the org. Run this statement after lock_placement.sql and under the
-- catalog's lock. Then the next slot number is free, and the copied placement is up to date. Returns no row if all slot
-- numbers are in use.
WITH free AS MATERIALIZED (
    SELECT n.slot FROM (SELECT greatest(max(p.slot), 16383) + 1 AS slot FROM windrow.placement p) n WHERE n.slot <= 32767
), next AS (
    UPDATE windrow.catalog c SET epoch = c.epoch + 1 WHERE EXISTS (SELECT FROM free) RETURNING c.epoch
), placed AS (
    INSERT INTO windrow.placement (slot, writes, reads, epoch, changed)
    SELECT free.slot, home.writes, home.reads, next.epoch, next.epoch
    FROM free, next, windrow.placement home
    WHERE home.slot = %(hash_slot)s
    RETURNING slot, epoch
), former AS (
    INSERT INTO windrow.former_owner (slot, shard, left_at)
    SELECT placed.slot, f.shard, f.left_at FROM placed, windrow.former_owner f WHERE f.slot = %(hash_slot)s
), pinned AS (
    INSERT INTO windrow.pin (org, slot, epoch, shard, label, value)
    SELECT %(org)s, placed.slot, placed.epoch, %(shard)s, %(label)s, %(value)s FROM placed
    RETURNING org, slot, epoch, shard, label, value
)
SELECT pinned.* FROM pinned
-- All routers listen to this channel.
CROSS JOIN (SELECT pg_notify('windrow_catalog', next.epoch::text) FROM next) told
