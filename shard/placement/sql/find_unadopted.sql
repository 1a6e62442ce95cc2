-- Returns the orgs for which this shard has not recorded the given slots.
SELECT n.org, n.slot, n.epoch
FROM unnest(%(orgs)s::text[], %(slots)s::smallint[], %(epochs)s::bigint[]) AS n (org, slot, epoch)
WHERE NOT EXISTS (SELECT FROM windrow.org o WHERE o.org = n.org AND o.slot = n.slot)
