-- Lets the first job through of each kind whose trial is due. Returns the queues of these jobs.
WITH due AS MATERIALIZED (
    SELECT k.queue_id, k.kind
    FROM windrow.quarantine k
    JOIN windrow.queue q ON q.queue_id = k.queue_id
    JOIN windrow.owned_slot o ON o.slot = q.slot AND o.state = 'owned'
    WHERE k.trial_id IS NULL AND k.next_trial_at <= now()
    ORDER BY k.next_trial_at
    LIMIT %(trials_max)s
    FOR UPDATE OF k SKIP LOCKED
), first AS MATERIALIZED (
    SELECT due.queue_id, due.kind, j.id, j.ctid
    FROM due
    CROSS JOIN LATERAL (
        SELECT j.id, j.ctid
        FROM windrow.job j
        WHERE j.queue_id = due.queue_id AND j.kind = due.kind AND {{is_set_aside(j)}}
        ORDER BY j.run_at, j.id
        LIMIT 1
        FOR UPDATE SKIP LOCKED
    ) j
), begun AS (
    UPDATE windrow.quarantine k
    SET trial_id = f.id, trial_at = now()
    FROM first f
    WHERE k.queue_id = f.queue_id AND k.kind = f.kind
), shown AS (
    UPDATE windrow.job j
    -- Never before now(): claims do not look below the floor.
    SET visible_at = greatest(j.run_at, now())
    WHERE j.ctid = ANY (ARRAY(SELECT f.ctid FROM first f))
)
SELECT f.queue_id FROM first f
