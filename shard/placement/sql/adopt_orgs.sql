-- Puts orgs into slots of their own. If an org is already in its own slot on this shard, the org stays there, even if
-- another shard still has the org in its hash slot.
UPDATE windrow.org o SET slot = n.slot
FROM unnest(%(orgs)s::text[], %(slots)s::smallint[]) AS n (org, slot)
WHERE o.org = n.org AND o.slot < n.slot
