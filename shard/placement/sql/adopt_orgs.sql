-- Puts orgs into slots of their own. An org that is in its own slot is never put back into its hash slot, whatever
-- another shard remembers.
UPDATE windrow.org o SET slot = n.slot
FROM unnest(%(orgs)s::text[], %(slots)s::smallint[]) AS n (org, slot)
WHERE o.org = n.org AND o.slot < n.slot
