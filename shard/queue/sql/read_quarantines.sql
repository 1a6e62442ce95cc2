-- Returns the kinds that are quarantined, with their trials.
SELECT
    k.queue_id, q.org, q.queue, k.kind, k.trial_id::text, k.trial_at,
    EXISTS (SELECT FROM windrow.owned_slot o WHERE o.slot = q.slot AND o.state = 'owned') AS is_owned,
    EXISTS (SELECT FROM windrow.owned_slot o WHERE o.slot = q.slot AND o.state = 'owned' AND NOT o.arriving) AS is_whole
FROM windrow.quarantine k
JOIN windrow.queue q ON q.queue_id = k.queue_id
