-- The kinds that are quarantined, with what is known of their trials. Forgets crashes that are a day old: they were too few.
WITH old AS (
    DELETE FROM windrow.crash c WHERE c.at < now() - interval '1 day'
)
SELECT
    k.queue_id, q.org, q.queue, k.kind, k.trial_id::text, k.trial_at,
    EXISTS (SELECT FROM windrow.owned_slot o WHERE o.slot = q.slot AND o.state = 'owned') AS is_owned
FROM windrow.quarantine k
JOIN windrow.queue q ON q.queue_id = k.queue_id
