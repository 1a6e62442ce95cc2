-- Lets this shard take jobs of these slots, from callers that know this epoch. Does not change a slot that the shard
-- knows with a later epoch. Returns the slots that changed.
INSERT INTO windrow.owned_slot AS o (slot, state, epoch, arriving)
SELECT n.slot, 'owned', %(epoch)s, true FROM unnest(%(slots)s::smallint[]) AS n (slot)
ON CONFLICT (slot) DO UPDATE SET state = excluded.state, epoch = excluded.epoch, chunk = 0, arriving = true
WHERE o.epoch < excluded.epoch
RETURNING o.slot
