-- Deletes the limits of an org for this queue and this measure, and notifies all routers. NULL stands for every queue,
-- or for every measure. Returns no row if there was no such limit.
WITH deleted AS (
    DELETE FROM windrow.usage_limit l
    WHERE l.org = %(org)s AND l.queue = coalesce(%(queue)s::text, l.queue) AND l.measure = coalesce(%(measure)s::text, l.measure)
    RETURNING 1
), version AS (
    UPDATE windrow.catalog c
    SET (limits_changed, limits_cleared) = (
        SELECT v.version, v.version
        FROM greatest(c.limits_changed + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS v (version)
    )
    WHERE EXISTS (SELECT FROM deleted)
    RETURNING c.limits_changed
)
SELECT version.limits_changed
FROM version
-- All routers listen to this channel.
CROSS JOIN LATERAL (SELECT pg_notify('windrow_catalog', 'limits ' || version.limits_changed)) told
