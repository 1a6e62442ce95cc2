-- Changes jobs that are blocked, scheduled or ready. A job whose lease has expired counts as ready. A parameter that is
-- NULL changes nothing. Returns the changed jobs with their queues. Also returns the jobs that are on their way to
-- another shard (departing), which it does not change.
WITH chosen AS (
    SELECT
        j.id, j.queue_id,
        -- The time at which the job becomes visible at its new place in a lane. The time is never before now(), because
        -- claims do not look below the floor. NULL: the job keeps its place.
        CASE
            WHEN %(run_at_us)s::bigint IS NOT NULL
                THEN greatest(now(), timestamptz 'epoch' + %(run_at_us)s::bigint * interval '1 us')
            WHEN %(delay_us)s::bigint IS NOT NULL THEN now() + %(delay_us)s::bigint * interval '1 us'
            WHEN %(priority)s::smallint <> j.priority THEN greatest(now(), j.visible_at)
        END AS due,
        coalesce(%(run_at_us)s::bigint, %(delay_us)s::bigint) IS NOT NULL AS moves
    FROM windrow.job j
    WHERE j.id = ANY (%(ids)s::uuid[]) AND (j.lease IS NULL OR j.visible_at <= now())
        -- If a new time is given, leave out blocked jobs, because they have no time before their workflow releases
        -- them.
        AND (j.run_at < 'infinity' OR coalesce(%(run_at_us)s::bigint, %(delay_us)s::bigint) IS NULL)
        AND {{org_of(j)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    -- Lock the jobs in the order of their ids, like all other statements that get ids, so that calls about the same
    -- jobs cannot deadlock.
    ORDER BY j.id
    FOR UPDATE
), altered AS (
    UPDATE windrow.job j
    SET
        priority = coalesce(%(priority)s::smallint, j.priority),
        attributes = nullif(coalesce(%(attributes)s::jsonb, j.attributes), '{}'),
        -- If a job waits for a group slot and gets no new time, `due` is infinity. The job then keeps its run_at, which
        -- is its place among the waiting jobs.
        run_at = coalesce(nullif(c.due, 'infinity'), j.run_at),
        visible_at = CASE
            WHEN c.due <= now() AND j.group_key > '' AND j.group_slot IS NULL THEN 'infinity'
            ELSE coalesce(c.due, j.visible_at)
        END,
        -- A job that waits for a signal now waits until its new time. It must expire at that time, because otherwise it
        -- would run then.
        expires_at = CASE WHEN {{awaits_signal(j)}} AND c.due < 'infinity' THEN c.due ELSE j.expires_at END,
        -- A job that will run later gives up its group slot, so that the other jobs of its group need not wait for it.
        group_slot = CASE WHEN NOT (c.moves AND c.due > now()) THEN j.group_slot END,
        -- If the job gets another place, and it has a lease that has expired without being noticed, record the end of
        -- the lease now.
        history = CASE WHEN c.due IS NULL THEN j.history ELSE {{history_with_lost(j)}} END,
        log = CASE WHEN c.due IS NULL THEN j.log END,
        lease = CASE WHEN c.due IS NULL THEN j.lease END,
        leased_at = CASE WHEN c.due IS NULL THEN j.leased_at END,
        worker = CASE WHEN c.due IS NULL THEN j.worker END
    FROM chosen c
    -- Finds the job by its id alone: see extend.sql.
    WHERE j.id = ANY (ARRAY[c.id]) AND (j.queue_id = c.queue_id) IS TRUE
    RETURNING j.id, j.queue_id
)
SELECT a.id::text, a.queue_id FROM altered a
UNION ALL
SELECT d.id::text, NULL
FROM windrow.departing d
WHERE d.id = ANY (%(ids)s::uuid[])
    AND {{org_of(d)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
