-- Returns which shard this database is, and the database's id.
SELECT i.cluster, i.shard, i.id::text FROM windrow.identity i
