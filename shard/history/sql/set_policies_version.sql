-- Sets the version of the org policies in the catalog to the version of the shard from which they were copied.
UPDATE windrow.policies p SET changed = %(version)s
