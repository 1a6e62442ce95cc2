-- The newest epoch of any slot that this shard knows.
SELECT coalesce(max(o.epoch), 0) FROM windrow.owned_slot o
