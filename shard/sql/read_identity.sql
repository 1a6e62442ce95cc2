-- Which shard this database is.
SELECT i.cluster, i.shard FROM windrow.identity i
