-- Changes a queue's configuration: sets the settings that are given, and resets the settings that `reset` names.
-- Without `draining`, this shard must own the slot, and the caller's epoch must not be older than the epoch since which
-- the shard owns the slot. With `draining`, the slot must be draining in the move of this epoch.
UPDATE windrow.queue AS q
SET {{altered_settings(q)}}, listed = true
FROM windrow.owned_slot s
WHERE q.org = %(org)s AND q.queue = %(queue)s
    AND s.slot = q.slot
    AND CASE
        WHEN %(draining)s THEN s.state = 'draining' AND s.epoch = %(epoch)s
        ELSE s.state = 'owned' AND s.epoch <= %(epoch)s
    END
RETURNING q.queue, q.created_at, {{effective_settings(q)}}
