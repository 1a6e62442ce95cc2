-- Sets a limit, and notifies all routers. Returns no row if the cluster already has `limits_max` limits.
WITH version AS (
    -- The UPDATE locks the row, so versions are committed in ascending order. A version is at least the time in
    -- microseconds. So a catalog that was restored from a backup gets newer versions than the versions that shards
    -- have.
    UPDATE windrow.catalog c
    SET limits_changed = greatest(c.limits_changed + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
    WHERE (SELECT count(*) FROM windrow.usage_limit) < %(limits_max)s OR EXISTS (
        SELECT FROM windrow.usage_limit l
        WHERE l.org = %(org)s AND l.queue = %(queue)s AND l.measure = %(measure)s
    )
    RETURNING c.limits_changed
), stored AS (
    INSERT INTO windrow.usage_limit AS l (org, queue, measure, amount, interval_us, changed)
    SELECT %(org)s, %(queue)s, %(measure)s, %(amount)s, %(interval_us)s, v.limits_changed FROM version v
    ON CONFLICT (org, queue, measure) DO UPDATE SET
        amount = excluded.amount, interval_us = excluded.interval_us, changed = excluded.changed
    RETURNING l.changed
)
SELECT stored.changed
FROM stored
-- All routers listen to this channel.
CROSS JOIN LATERAL (SELECT pg_notify('windrow_catalog', 'limits ' || stored.changed)) told
