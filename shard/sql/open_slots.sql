-- These slots take jobs here, by those who know this epoch. What the shard knows of a later one stays. Answers those that
-- were news.
INSERT INTO windrow.owned_slot AS o (slot, state, epoch)
SELECT n.slot, 'owned', %(epoch)s FROM unnest(%(slots)s::smallint[]) AS n (slot)
ON CONFLICT (slot) DO UPDATE SET state = excluded.state, epoch = excluded.epoch, chunk = 0 WHERE o.epoch < excluded.epoch
RETURNING o.slot
