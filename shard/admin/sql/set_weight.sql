-- Sets the weight of an org, and notifies all routers. NULL removes the weight. Returns no row if `weights_max` orgs
-- already have a weight.
WITH version AS (
    -- The UPDATE locks the row, so versions are committed in ascending order. A version is at least the time in
    -- microseconds. So a catalog that was restored from a backup gets versions that no router has seen.
    UPDATE windrow.catalog c
    SET weights_changed = greatest(c.weights_changed + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
    WHERE %(weight)s::double precision IS NULL
        OR (SELECT count(*) FROM windrow.org_weight) < %(weights_max)s::bigint
        OR EXISTS (SELECT FROM windrow.org_weight w WHERE w.org = %(org)s::text)
    RETURNING c.weights_changed
), removed AS (
    DELETE FROM windrow.org_weight w WHERE w.org = %(org)s::text AND %(weight)s::double precision IS NULL
), stored AS (
    INSERT INTO windrow.org_weight AS w (org, weight)
    SELECT %(org)s::text, %(weight)s::double precision FROM version WHERE %(weight)s::double precision IS NOT NULL
    ON CONFLICT (org) DO UPDATE SET weight = excluded.weight
)
SELECT version.weights_changed
FROM version
-- All routers listen to this channel.
CROSS JOIN LATERAL (SELECT pg_notify('windrow_catalog', 'weights ' || version.weights_changed)) told
