-- Sets the version of the copied policies. Returns no row if the shard's copy has this version or a newer version.
UPDATE windrow.policies p SET copied = %(version)s WHERE p.copied < %(version)s RETURNING p.copied
