-- Makes this database a shard's, unless it is one already.
INSERT INTO windrow.identity (cluster, shard) VALUES (%(cluster)s, %(shard)s) ON CONFLICT DO NOTHING
