-- Returns an org's own slot, and where the org should live.
SELECT pin.org, pin.slot, pin.epoch, pin.shard, pin.label, pin.value FROM windrow.pin WHERE pin.org = %(org)s
