-- The orgs with a slot of their own, and where each should live.
SELECT pin.org, pin.slot, pin.epoch, pin.shard, pin.label, pin.value FROM windrow.pin ORDER BY pin.slot
