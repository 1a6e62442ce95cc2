-- The orgs with a slot of their own that this shard writes.
SELECT pin.org, pin.slot, pin.epoch, pin.shard, pin.label, pin.value
FROM windrow.pin
JOIN windrow.placement p ON p.slot = pin.slot
WHERE p.writes = ARRAY[%(shard)s::text]
    -- What is done elsewhere because of this must not be lost here: it is on the standby first. See find_known.sql.
    AND (SELECT pg_logical_emit_message(true, 'windrow', '')) IS NOT NULL
ORDER BY pin.org
