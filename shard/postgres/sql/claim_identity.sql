-- Makes this database the database of a shard, unless it is one already.
INSERT INTO windrow.identity (cluster, shard, id) VALUES (%(cluster)s, %(shard)s, gen_random_uuid()) ON CONFLICT DO NOTHING
