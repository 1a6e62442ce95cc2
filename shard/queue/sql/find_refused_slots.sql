-- Finds the orgs whose jobs this shard refuses from callers whose placements have these epochs. Returns the place of
-- each such org in the arrays, its slot, and the slot's state and epoch on this shard. If this shard has no row of an
-- org, the org is in its hash slot.
SELECT n.place, slot.slot, coalesce(s.state, 'foreign') AS state, coalesce(s.epoch, 0) AS epoch
FROM unnest(%(orgs)s::text[], %(slots)s::smallint[], %(epochs)s::bigint[]) WITH ORDINALITY AS n (org, slot, epoch, place)
CROSS JOIN LATERAL (
    SELECT coalesce((SELECT o.slot FROM windrow.org o WHERE o.org = n.org), n.slot) AS slot OFFSET 0
) slot
LEFT JOIN windrow.owned_slot s ON s.slot = slot.slot
WHERE s.state IS DISTINCT FROM 'owned' OR s.epoch > n.epoch
