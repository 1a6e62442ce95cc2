-- The newest epoch of a slot that this shard knows.
SELECT coalesce(max(o.epoch), 0) FROM windrow.owned_slot o
