-- Where an org with a slot of its own is to live from now on. No row: it has none. The epoch tells balancers to look.
WITH wished AS (
    UPDATE windrow.pin SET shard = %(shard)s, label = %(label)s, value = %(value)s
    WHERE pin.org = %(org)s
    RETURNING pin.org, pin.slot, pin.epoch, pin.shard, pin.label, pin.value
), next AS (
    UPDATE windrow.catalog c SET epoch = c.epoch + 1 WHERE EXISTS (SELECT FROM wished) RETURNING c.epoch
)
SELECT wished.* FROM wished
CROSS JOIN (SELECT pg_notify('windrow_catalog', next.epoch::text) FROM next) told
