-- Locks schedules whose `wake_at` has passed, and returns what is needed to decide about them. Begins with the
-- schedules that have waited for the longest time. Other routers skip these schedules until this transaction ends.
-- Leaves out schedules of slots that this shard does not own (invariant I6). The transaction keeps a lock on the table
-- `owned_slot`, and a transaction that closes slots waits for this lock.
SELECT
    s.id::text, o.org, s.org_id, s.name, s.queue, q.queue_id IS NOT NULL AS has_queue, {{schedule_spec(s)}}, s.next_at, s.last_at, s.last_job::text,
    s.buffered, s.decided,
    -- `matters`: whether the decision depends on whether the job of the previous run is live. `is_live` is computed
    -- only if `matters` is true.
    s.last_job IS NOT NULL AND (s.overlap <> 'allow' OR s.buffered > 0) AS matters,
    CASE WHEN s.last_job IS NOT NULL AND (s.overlap <> 'allow' OR s.buffered > 0) THEN
        EXISTS (SELECT FROM windrow.job j WHERE j.id = s.last_job AND {{org_of(j)}} = s.org_id)
        OR EXISTS (
            SELECT FROM windrow.departing d WHERE d.id = s.last_job AND {{org_of(d)}} = s.org_id AND d.reason IS NULL
        )
    END AS is_live,
    now() AS now
FROM (
    -- Postgres locks no more rows than the LIMIT, because the scan of the index ends there.
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
