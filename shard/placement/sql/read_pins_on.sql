-- Returns the orgs with slots of their own whose new jobs are written to this shard.
SELECT pin.org, pin.slot, pin.epoch, pin.shard, pin.label, pin.value
FROM windrow.pin
JOIN windrow.placement p ON p.slot = pin.slot
WHERE p.writes = ARRAY[%(shard)s::text]
    -- Other shards act on this answer, so it must survive a failover. The emitted message makes the commit wait for the
    -- standby: see find_known.sql.
    AND (SELECT pg_logical_emit_message(true, 'windrow', '')) IS NOT NULL
ORDER BY pin.org
