-- Quarantines a kind on the order of an operator, until an operator releases it. Without `draining`, this shard must
-- own the slot, since an epoch that is not later than the caller's. With `draining`, the slot must be draining in the
-- move of this epoch. A kind that is quarantined already gets this reason, and no more trials. Does nothing if the org
-- already has the maximum number of quarantined kinds.
INSERT INTO windrow.quarantine AS k (queue_id, kind, crashes, reason, pause_s)
SELECT q.queue_id, %(kind)s, 0, %(reason)s, %(pause_s)s
FROM windrow.queue q
JOIN windrow.owned_slot s ON s.slot = q.slot
WHERE q.org = %(org)s AND q.queue = %(queue)s
    AND CASE
        WHEN %(draining)s THEN s.state = 'draining' AND s.epoch = %(epoch)s
        ELSE s.state = 'owned' AND s.epoch <= %(epoch)s
    END
    AND (
        EXISTS (SELECT FROM windrow.quarantine k WHERE k.queue_id = q.queue_id AND k.kind = %(kind)s)
        OR {{may_quarantine(q)}}
    )
ON CONFLICT (queue_id, kind) DO UPDATE
SET reason = excluded.reason, next_trial_at = NULL, trial_id = NULL, trial_at = NULL
RETURNING k.kind
