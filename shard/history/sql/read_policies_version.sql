-- Returns the version of the policies that this shard has copied.
SELECT p.copied FROM windrow.policies p
