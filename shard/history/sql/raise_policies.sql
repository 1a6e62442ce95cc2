-- On the catalog: raises the version of the org policies. A version is at least the time in microseconds, so that a
-- catalog that was restored from a backup gets newer versions than the versions that shards have.
UPDATE windrow.policies p SET changed = greatest(p.changed + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
