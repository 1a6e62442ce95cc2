-- Takes a copy's version. No row: what the shard has is as new.
UPDATE windrow.policies p SET copied = %(version)s WHERE p.copied < %(version)s RETURNING p.copied
