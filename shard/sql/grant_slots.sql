-- Tells a shard which slots it owns. What it knows of a later epoch stays.
INSERT INTO windrow.owned_slot AS o (slot, state, epoch)
SELECT n.slot, 'owned', n.epoch
FROM unnest(%(slots)s::smallint[], %(epochs)s::bigint[]) AS n (slot, epoch)
ON CONFLICT (slot) DO UPDATE SET state = excluded.state, epoch = excluded.epoch WHERE o.epoch < excluded.epoch
RETURNING o.slot
