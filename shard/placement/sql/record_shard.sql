-- Records which database belongs to a shard. Another database may replace this database only while the shard holds no
-- slots and is not a former owner. Otherwise, the data in the first database would be lost.
INSERT INTO windrow.shard AS s (shard, id) VALUES (%(shard)s, %(id)s::uuid)
ON CONFLICT (shard) DO UPDATE SET id = excluded.id, mark = NULL, mark_token = NULL, marked_at = NULL
WHERE NOT EXISTS (SELECT FROM windrow.placement p WHERE s.shard = ANY (p.reads))
    AND NOT EXISTS (SELECT FROM windrow.former_owner f WHERE f.shard = s.shard)
