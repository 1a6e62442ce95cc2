-- These slots take no jobs here, not now nor ever again under this epoch. What the shard knows of a later one stays.
INSERT INTO windrow.owned_slot AS o (slot, state, epoch)
SELECT n.slot, 'draining', %(epoch)s FROM unnest(%(slots)s::smallint[]) AS n (slot)
ON CONFLICT (slot) DO UPDATE SET state = excluded.state, epoch = excluded.epoch, chunk = 0 WHERE o.epoch < excluded.epoch
