-- The slot that is an org's own, and where the org is to live.
SELECT pin.org, pin.slot, pin.epoch, pin.shard, pin.label, pin.value FROM windrow.pin WHERE pin.org = %(org)s
