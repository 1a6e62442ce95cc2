-- On the catalog: what orgs are told changes. Versions grow with the time too, so that those of a catalog that was restored
-- from a backup are newer than what shards have.
UPDATE windrow.policies p SET changed = greatest(p.changed + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
