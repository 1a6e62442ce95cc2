-- Locks a workflow until the end of the transaction. Later statements of the transaction see what all earlier folds
-- have done. Returns no row if the shard does not own the slot of the org.
SELECT o.org_id, windrow.lock_workflows(ARRAY[o.org_id], ARRAY[%(id)s::uuid])::text
FROM windrow.org o
JOIN windrow.owned_slot s ON s.slot = o.slot
WHERE o.org = %(org)s AND s.state = 'owned' AND s.epoch <= %(epoch)s
