-- Puts orgs into slots of their own. Never puts an org that is in its own slot back into its hash slot, even if another
-- shard still has the org in its hash slot.
UPDATE windrow.org o SET slot = n.slot
FROM unnest(%(orgs)s::text[], %(slots)s::smallint[]) AS n (org, slot)
WHERE o.org = n.org AND o.slot < n.slot
