-- Ends a trial whose job has not ended properly. If the job crashed, the next trial comes after a pause, which doubles
-- each time, up to pause_s_max. If the job does not exist any more or was cancelled, the next trial may come at once.
UPDATE windrow.quarantine k
SET
    trial_id = NULL, trial_at = NULL,
    crashes = k.crashes + %(crashed)s::boolean::int,
    pause_s = CASE WHEN %(crashed)s THEN least(2 * k.pause_s, %(pause_s_max)s) ELSE k.pause_s END,
    next_trial_at = CASE
        WHEN k.next_trial_at IS NULL THEN NULL
        WHEN %(crashed)s THEN now() + least(2 * k.pause_s, %(pause_s_max)s) * interval '1 s'
        ELSE now()
    END
WHERE k.queue_id = %(queue_id)s AND k.kind = %(kind)s AND k.trial_id = %(trial_id)s::uuid
