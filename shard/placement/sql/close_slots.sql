-- Stops this shard from taking jobs of these slots, and records this epoch for them. Does not change a slot that the
-- shard knows with a later epoch.
INSERT INTO windrow.owned_slot AS o (slot, state, epoch)
SELECT n.slot, 'draining', %(epoch)s FROM unnest(%(slots)s::smallint[]) AS n (slot)
ON CONFLICT (slot) DO UPDATE SET state = excluded.state, epoch = excluded.epoch, chunk = 0 WHERE o.epoch < excluded.epoch
