-- Tells a shard which slots it owns. A slot that the shard knows with a later epoch stays as it is.
INSERT INTO windrow.owned_slot AS o (slot, state, epoch)
SELECT n.slot, 'owned', n.epoch
FROM unnest(%(slots)s::smallint[], %(epochs)s::bigint[]) AS n (slot, epoch)
ON CONFLICT (slot) DO UPDATE SET state = excluded.state, epoch = excluded.epoch, arriving = false
WHERE o.epoch < excluded.epoch
RETURNING o.slot
