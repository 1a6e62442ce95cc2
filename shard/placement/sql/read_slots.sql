-- Returns what this shard knows about these slots.
SELECT o.slot, o.state, o.epoch, o.chunk
FROM unnest(%(slots)s::smallint[]) AS n (slot)
CROSS JOIN LATERAL (SELECT o.* FROM windrow.owned_slot o WHERE o.slot = n.slot OFFSET 0) o
-- Other shards act on this answer, so it must survive a failover. The emitted message makes the commit wait for the
-- standby: see find_known.sql.
WHERE (SELECT pg_logical_emit_message(true, 'windrow', '')) IS NOT NULL
