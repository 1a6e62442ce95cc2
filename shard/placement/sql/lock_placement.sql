-- Returns the shards on which a slot is. Locks the placement of the slot, so that it does not change until this
-- transaction ends.
SELECT p.reads FROM windrow.placement p WHERE p.slot = %(slot)s FOR UPDATE
