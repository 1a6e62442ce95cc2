-- Locks a schedule of an org whose slot this shard owns. Returns the schedule and the present time.
SELECT {{schedule_record(s)}}, o.org, s.payload, now() AS now
FROM windrow.schedule s
JOIN windrow.org o ON o.org_id = s.org_id
JOIN windrow.owned_slot w ON w.slot = o.slot
WHERE o.org = %(org)s AND s.name = %(name)s AND w.state = 'owned' AND w.epoch <= %(epoch)s
FOR UPDATE OF s
