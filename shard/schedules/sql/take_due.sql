-- Locks schedules that must be looked at, and returns what a decision about them needs. Begins with the schedules that
-- have waited longest. Other routers skip these schedules until this transaction ends. The statement leaves out
-- schedules of slots that this shard does not own (I6). The transaction keeps a lock on owned_slot, and the close of a
-- slot waits for this lock.
SELECT
    s.id::text, o.org, s.org_id, s.name, s.queue, q.queue_id IS NOT NULL AS has_queue, {{schedule_spec(s)}}, s.next_at, s.last_at, s.last_job::text,
    s.buffered, s.decided,
    -- Whether the decision depends on whether the job of the previous run is live. `is_live` is looked up only if it
    -- does.
    s.last_job IS NOT NULL AND (s.overlap <> 'allow' OR s.buffered > 0) AS matters,
    CASE WHEN s.last_job IS NOT NULL AND (s.overlap <> 'allow' OR s.buffered > 0) THEN
        EXISTS (SELECT FROM windrow.job j WHERE j.id = s.last_job AND {{org_of(j)}} = s.org_id)
        OR EXISTS (
            SELECT FROM windrow.departing d WHERE d.id = s.last_job AND {{org_of(d)}} = s.org_id AND d.reason IS NULL
        )
    END AS is_live,
    now() AS now
FROM (
    -- No row is locked beyond the LIMIT: the scan of the index stops there.
    SELECT s.*
    FROM windrow.schedule s
    WHERE s.wake_at <= now()
        AND {{is_fired_here(s)}}
    ORDER BY s.wake_at
    LIMIT %(rows)s
    FOR UPDATE OF s SKIP LOCKED
) s
CROSS JOIN LATERAL (SELECT o.org FROM windrow.org o WHERE o.org_id = s.org_id OFFSET 0) o
LEFT JOIN LATERAL (
    SELECT q.queue_id FROM windrow.queue q WHERE q.org = o.org AND q.queue = s.queue OFFSET 0
) q ON true
