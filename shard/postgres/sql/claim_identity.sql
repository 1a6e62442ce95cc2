-- Makes this database the database of a shard, unless it is the database of a shard already.
INSERT INTO windrow.identity (cluster, shard, id) VALUES (%(cluster)s, %(shard)s, gen_random_uuid()) ON CONFLICT DO NOTHING
