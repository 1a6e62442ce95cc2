-- Where an org with a slot of its own is to live from now on. No row: it has none.
UPDATE windrow.pin SET shard = %(shard)s, label = %(label)s, value = %(value)s
WHERE pin.org = %(org)s
RETURNING pin.org, pin.slot, pin.epoch, pin.shard, pin.label, pin.value
