-- Which shard this database is, and which database. By an earlier release's schema it has no id.
SELECT i.cluster, i.shard, to_jsonb(i) ->> 'id' AS id FROM windrow.identity i
