-- Returns where a slot is, and keeps it there until this transaction ends.
SELECT p.reads FROM windrow.placement p WHERE p.slot = %(slot)s FOR UPDATE
