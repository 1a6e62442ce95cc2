-- Raises the version of the org policies in the catalog. A version is at least the time in microseconds, so that a
-- catalog that was restored from a backup gets newer versions than the versions that shards have.
UPDATE windrow.policies p SET changed = greatest(p.changed + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
