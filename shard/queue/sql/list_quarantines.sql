-- Returns the quarantined kinds of an org, and how many jobs of each kind are set aside, counted up to jobs_max. If
-- `queue` or `kind` is not empty, returns only kinds of this queue, or only this kind.
SELECT
    q.queue, k.kind, k.since, k.crashes, k.reason, CASE WHEN k.trial_id IS NULL THEN k.next_trial_at END AS next_trial_at,
    k.trial_id::text, k.trial_at, held.jobs
FROM windrow.queue q
CROSS JOIN LATERAL (SELECT k.* FROM windrow.quarantine k WHERE k.queue_id = q.queue_id OFFSET 0) k
CROSS JOIN LATERAL (
    SELECT count(*) AS jobs
    FROM (
        SELECT FROM windrow.job j
        WHERE j.queue_id = k.queue_id AND j.kind = k.kind AND {{is_set_aside(j)}}
        LIMIT %(jobs_max)s
    ) counted
) held
WHERE q.org = %(org)s AND (%(queue)s = '' OR q.queue = %(queue)s)
    AND (%(kind)s = '' OR k.kind = %(kind)s)
ORDER BY q.queue, k.kind
LIMIT %(kinds_max)s
