-- Returns the number and the state of a workflow on this shard, if the shard still owns the slot of its org.
SELECT w.flow, w.org_id, w.state
FROM windrow.org o
JOIN windrow.owned_slot s ON s.slot = o.slot
JOIN windrow.workflow w ON w.org_id = o.org_id AND w.id = %(id)s::uuid
WHERE o.org = %(org)s AND s.state = 'owned' AND s.epoch <= %(epoch)s
