-- Puts orgs into slots of their own: who is in one is never put back into the slot of its hash, whatever another shard
-- remembers.
UPDATE windrow.org o SET slot = n.slot
FROM unnest(%(orgs)s::text[], %(slots)s::smallint[]) AS n (org, slot)
WHERE o.org = n.org AND o.slot < n.slot
