-- Returns the orgs that have a slot of their own, and where each org should live.
SELECT pin.org, pin.slot, pin.epoch, pin.shard, pin.label, pin.value FROM windrow.pin ORDER BY pin.slot
