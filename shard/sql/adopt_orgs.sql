-- Puts orgs into the slots in which another shard has them.
UPDATE windrow.org o SET slot = n.slot
FROM unnest(%(orgs)s::text[], %(slots)s::smallint[]) AS n (org, slot)
WHERE o.org = n.org AND o.slot <> n.slot
