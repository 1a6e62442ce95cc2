-- Sets the version of the copied policies. No row: the shard's copy has this version or a newer one.
UPDATE windrow.policies p SET copied = %(version)s WHERE p.copied < %(version)s RETURNING p.copied
