-- Returns the shards on which a slot is. Locks this placement, so that it does not change until this transaction ends.
SELECT p.reads FROM windrow.placement p WHERE p.slot = %(slot)s FOR UPDATE
