-- Returns why a job waits for a slot of its group: how many slots the group may have, how many slots are taken, how
-- many of the jobs that have a slot are leased, and how many jobs wait before this job, counted up to jobs_max. Also
-- returns the job whose lease ends first. If no job of the group is leased, returns the job that has the first slot
-- instead. No row: the job does not wait.
SELECT
    j.group_key, coalesce(q.group_concurrency, 1) AS concurrency, held.taken, held.leased, held.ids[1] AS holder_id,
    held.workers[1] AS worker, held.untils[1] AS until, ahead.jobs AS ahead
FROM windrow.queue q
-- OFFSET 0 makes Postgres find the job by its id, never by a scan of all jobs that wait.
CROSS JOIN LATERAL (
    SELECT j.id, j.queue_id, j.group_key, j.group_slot, j.run_at, j.visible_at
    FROM windrow.job j
    WHERE j.id = %(id)s::uuid
    OFFSET 0
) j
CROSS JOIN LATERAL (
    SELECT
        count(*) AS taken, count(*) FILTER (WHERE h.until IS NOT NULL) AS leased,
        array_agg(h.id::text ORDER BY h.until, h.group_slot) AS ids,
        array_agg(h.worker ORDER BY h.until, h.group_slot) AS workers,
        array_agg(h.until ORDER BY h.until, h.group_slot) AS untils
    FROM (
        SELECT
            h.id, h.group_slot, h.worker,
            CASE WHEN h.lease IS NOT NULL AND h.visible_at > now() THEN h.visible_at END AS until
        FROM windrow.job h
        WHERE h.queue_id = q.queue_id AND h.group_key = j.group_key AND h.group_slot IS NOT NULL
    ) h
) held
CROSS JOIN LATERAL (
    SELECT count(*) AS jobs
    FROM (
        SELECT
        FROM windrow.job w
        WHERE w.queue_id = q.queue_id AND w.group_key = j.group_key AND w.group_slot IS NULL
            AND NOT isfinite(w.visible_at) AND isfinite(w.run_at) AND (w.run_at, w.id) < (j.run_at, j.id)
        ORDER BY w.run_at, w.id
        LIMIT %(jobs_max)s::bigint
    ) before
) ahead
WHERE q.org = %(org)s AND q.queue = %(queue)s AND j.queue_id = q.queue_id
    AND j.group_key IS NOT NULL AND j.group_slot IS NULL AND j.visible_at = 'infinity' AND j.run_at < 'infinity'
