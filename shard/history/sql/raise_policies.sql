-- On the catalog: raises the version of the org policies. Versions grow with time too, so that a catalog that was
-- restored from a backup gets versions newer than those that shards have.
UPDATE windrow.policies p SET changed = greatest(p.changed + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
