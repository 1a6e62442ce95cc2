-- Whose a database is, beyond names, which another cluster may have too (docs/decisions/0023-a-shard-is-its-database.md).

-- Random, and kept by copies and backups. NULL: made by an earlier release, and known by its names alone.
ALTER TABLE windrow.identity ADD COLUMN id uuid;

-- The catalog: the shards whose databases have been made, and the ids of these. No other will do for a shard that holds slots,
-- or has held some.
CREATE TABLE windrow.shard (
    shard text COLLATE "C" PRIMARY KEY,
    id uuid
);
INSERT INTO windrow.shard (shard)
SELECT unnest(p.reads) FROM windrow.placement p
UNION
SELECT f.shard FROM windrow.former_owner f;
