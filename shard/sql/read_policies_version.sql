-- Of the copy that this shard has.
SELECT p.copied FROM windrow.policies p
