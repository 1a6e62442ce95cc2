-- Tells a shard which slots it owns. Does not change a slot that the shard knows with a later epoch. When a router
-- starts, it runs this statement on every shard, and nearly always the shard knows its slots already. EXCEPT leaves out
-- these slots, because ON CONFLICT would lock each of their rows, and write nearly a megabyte of WAL.
INSERT INTO windrow.owned_slot AS o (slot, state, epoch)
SELECT n.slot, 'owned', n.epoch
FROM (
    SELECT given.slot, given.epoch FROM unnest(%(slots)s::smallint[], %(epochs)s::bigint[]) AS given (slot, epoch)
    EXCEPT
    SELECT k.slot, k.epoch FROM windrow.owned_slot k
) n
ON CONFLICT (slot) DO UPDATE SET state = excluded.state, epoch = excluded.epoch, arriving = false
WHERE o.epoch < excluded.epoch
RETURNING o.slot
