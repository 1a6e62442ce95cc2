-- Where a slot is; it goes nowhere else before this transaction ends.
SELECT p.reads FROM windrow.placement p WHERE p.slot = %(slot)s FOR UPDATE
