-- What this shard knows of these slots.
SELECT o.slot, o.state, o.epoch, o.chunk
FROM unnest(%(slots)s::smallint[]) AS n (slot)
CROSS JOIN LATERAL (SELECT o.* FROM windrow.owned_slot o WHERE o.slot = n.slot OFFSET 0) o
