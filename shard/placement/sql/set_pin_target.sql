-- Sets where an org with a slot of its own should live. Returns no row if the org has no slot of its own. If the target
-- has changed, the catalog gets a new epoch, so that balancers read the catalog again.
WITH before AS MATERIALIZED (
    SELECT
        pin.slot,
        (pin.shard, pin.label, pin.value) IS DISTINCT FROM (%(shard)s::text, %(label)s::text, %(value)s::text) AS differs
    FROM windrow.pin
    WHERE pin.org = %(org)s
    FOR UPDATE
), wished AS (
    UPDATE windrow.pin SET shard = %(shard)s, label = %(label)s, value = %(value)s
    FROM before
    WHERE pin.slot = before.slot
    RETURNING pin.org, pin.slot, pin.epoch, pin.shard, pin.label, pin.value
), next AS (
    UPDATE windrow.catalog c SET epoch = c.epoch + 1 WHERE EXISTS (SELECT FROM before WHERE before.differs) RETURNING c.epoch
)
SELECT wished.* FROM wished
LEFT JOIN (SELECT pg_notify('windrow_catalog', next.epoch::text) FROM next) told ON true
