-- Returns the newest epoch of all slots that this shard knows.
SELECT coalesce(max(o.epoch), 0) FROM windrow.owned_slot o
