-- Unlists an empty queue of an owned slot, resets its configuration, and ends its quarantines. The queue's row is kept,
-- because finished jobs refer to it.
WITH unlisted AS (
    UPDATE windrow.queue AS q
    SET {{default_settings}}, listed = false
    FROM windrow.owned_slot s
    WHERE q.org = %(org)s AND q.queue = %(queue)s AND q.listed
        AND s.slot = q.slot AND s.state = 'owned' AND s.epoch <= %(epoch)s
        AND NOT EXISTS (SELECT FROM windrow.job j WHERE j.queue_id = q.queue_id)
        AND NOT EXISTS (SELECT FROM windrow.dead d WHERE d.queue_id = q.queue_id)
    RETURNING q.queue, q.queue_id
), reopened AS (
    DELETE FROM windrow.quarantine k USING unlisted u WHERE k.queue_id = u.queue_id
)
SELECT unlisted.queue FROM unlisted
