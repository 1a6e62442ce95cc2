-- The orgs with a slot of their own that this shard writes.
SELECT pin.org, pin.slot, pin.epoch, pin.shard, pin.label, pin.value
FROM windrow.pin
JOIN windrow.placement p ON p.slot = pin.slot
WHERE p.writes = ARRAY[%(shard)s::text]
ORDER BY pin.org
