-- On the catalog: sets the version of the org policies to that of the shard from which they were copied.
UPDATE windrow.policies p SET changed = %(version)s
