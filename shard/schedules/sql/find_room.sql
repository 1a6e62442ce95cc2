-- Returns the number of an org whose slot this shard owns, and how many schedules the org has. Returns no row if the
-- shard does not own the slot.
SELECT o.org_id, (SELECT count(*) FROM windrow.schedule s WHERE s.org_id = o.org_id) AS schedules, now() AS now
FROM windrow.org o
JOIN windrow.owned_slot w ON w.slot = o.slot
WHERE o.org = %(org)s AND w.state = 'owned' AND w.epoch <= %(epoch)s
