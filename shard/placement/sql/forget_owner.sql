-- Makes routers stop asking this shard about slots that have left it. Returns the number of these slots. Returns 0 and
-- changes nothing if the shard holds any slot, or if a slot left the shard less than `left_us` ago.
WITH gone AS (
    DELETE FROM windrow.former_owner f
    WHERE f.shard = %(shard)s AND NOT EXISTS (SELECT FROM windrow.placement p WHERE %(shard)s = ANY (p.reads))
        AND NOT EXISTS (
            SELECT FROM windrow.former_owner late
            WHERE late.shard = %(shard)s AND late.left_at + %(left_us)s * interval '1 microsecond' > now()
        )
    RETURNING f.slot
), next AS (
    UPDATE windrow.catalog c SET epoch = c.epoch + 1 WHERE EXISTS (SELECT FROM gone) RETURNING c.epoch
), changed AS (
    UPDATE windrow.placement p SET changed = next.epoch
    FROM gone, next
    WHERE p.slot = gone.slot
    RETURNING p.slot
)
SELECT (SELECT count(*) FROM changed) AS slots
FROM (SELECT 1) one
-- All routers listen to this channel.
LEFT JOIN (SELECT pg_notify('windrow_catalog', next.epoch::text) FROM next) told ON true
