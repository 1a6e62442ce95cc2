-- Unlists an empty queue of an owned slot and forgets its configuration. The row stays: finished jobs are found by it.
UPDATE windrow.queue AS q
SET listed = false, retry = NULL, max_attempts = NULL, retention = NULL, paused = false
FROM windrow.owned_slot s
WHERE q.org = %(org)s AND q.queue = %(queue)s AND q.listed
    AND s.slot = q.slot AND s.state = 'owned' AND s.epoch <= %(epoch)s
    AND NOT EXISTS (SELECT FROM windrow.job j WHERE j.queue_id = q.queue_id)
    AND NOT EXISTS (SELECT FROM windrow.dead d WHERE d.queue_id = q.queue_id)
RETURNING q.queue
