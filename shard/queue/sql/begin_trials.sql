-- Lets through the first job of each kind whose trial is due. Returns the queues of these jobs. If the job of a trial
-- waits for a slot of its group, or for nodes that it has added, another job becomes the trial. The reason: the jobs
-- that have the group's slots, or the jobs of those nodes, may be set aside until the trial has ended.
WITH due AS MATERIALIZED (
    SELECT k.queue_id, k.kind
    FROM windrow.quarantine k
    JOIN windrow.queue q ON q.queue_id = k.queue_id
    JOIN windrow.owned_slot o ON o.slot = q.slot AND o.state = 'owned'
    WHERE k.next_trial_at <= now()
        AND (
            k.trial_id IS NULL
            OR EXISTS (
                SELECT
                FROM windrow.job j
                WHERE j.id = k.trial_id AND j.queue_id = k.queue_id AND NOT isfinite(j.visible_at)
                    AND (j.group_key IS NOT NULL AND j.group_slot IS NULL OR {{is_blocked(j)}})
                OFFSET 0
            )
        )
    ORDER BY k.next_trial_at
    LIMIT %(trials_max)s
    FOR UPDATE OF k SKIP LOCKED
), first AS MATERIALIZED (
    SELECT j.ctid
    FROM due
    CROSS JOIN LATERAL (
        SELECT j.ctid
        FROM windrow.job j
        WHERE j.queue_id = due.queue_id AND j.kind = due.kind AND {{is_set_aside(j)}}
        ORDER BY j.run_at, j.id
        LIMIT 1
        FOR UPDATE SKIP LOCKED
    ) j
), shown AS (
    UPDATE windrow.job j
    -- The new visible_at is never before now(), because claims do not look below the floor.
    SET visible_at = greatest(j.run_at, now())
    WHERE j.ctid = ANY (ARRAY(SELECT f.ctid FROM first f))
    -- This CTE may have fewer rows than `first`, because an UPDATE by ctid does not see a row that was changed after
    -- the snapshot was taken.
    RETURNING j.queue_id, j.kind, j.id
), begun AS (
    UPDATE windrow.quarantine k
    SET trial_id = s.id, trial_at = now()
    FROM shown s
    WHERE k.queue_id = s.queue_id AND k.kind = s.kind
)
SELECT s.queue_id FROM shown s
