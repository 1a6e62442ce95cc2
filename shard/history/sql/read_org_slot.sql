-- Returns the slot that this shard has recorded for an org.
SELECT o.slot FROM windrow.org o WHERE o.org = %(org)s
