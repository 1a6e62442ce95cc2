-- Gives a signal to the job of a node that waits for a signal. If the workflow has released the node, the job of the
-- node succeeds, and the signal is its result. A blocked job keeps the signal as its checkpoint, until its workflow
-- releases the job. Returns what was done, and the queues in which other jobs may have become ready because of
-- workflows or limits. No row: the job is not on this shard, has ended, or has just changed.
WITH ended AS (
    -- Also deletes a job that a claim has leased because the job has expired. The statement that deletes the row first
    -- decides how the job ends.
    DELETE FROM windrow.job j
    WHERE j.id = ANY (ARRAY[%(id)s::uuid]) AND j.workflow_node = %(node)s AND NOT {{is_blocked(j)}}
        AND {{org_of(j)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    RETURNING j.*
), moved AS (
    INSERT INTO windrow.finished (
        id, queue_id, enqueued_at, run_at, expires_at, priority, attempt, max_attempts,
        {{kept_content}}, history, state, lease, result, finished_at, retention
    )
    SELECT
        e.id, e.queue_id, e.enqueued_at, e.run_at, e.expires_at, e.priority,
        -- If the job has a lease, a claim has leased it because it has expired. That claim has counted an attempt,
        -- which must not count.
        e.attempt - CASE WHEN e.lease IS NULL THEN 0 ELSE 1 END, e.max_attempts, {{kept_content(e)}}, e.history, 'succeeded',
        -- No lease has the number 0.
        0, %(payload)b::bytea, {{finish_time}}, {{retention_of(e)}}
    FROM ended e
), early AS (
    UPDATE windrow.job j SET checkpoint = %(payload)b::bytea
    WHERE j.id = ANY (ARRAY[%(id)s::uuid]) AND j.workflow_node = %(node)s AND {{is_blocked(j)}} AND j.checkpoint IS NULL
        AND {{org_of(j)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    RETURNING j.id
)
SELECT
    'taken' AS what,
    CASE WHEN e.lease < 0 THEN ARRAY[e.queue_id] END
        || ARRAY(SELECT
            windrow.queues_behind(
                {{org_of(e)}}, left(e.workflow_node, 36)::uuid, ARRAY[substr(e.workflow_node, 38)::integer]
            )
        ) AS freed_in
FROM ended e
UNION ALL
SELECT 'taken', NULL FROM early
UNION ALL
-- This SELECT reads the row as it was before the update in `early`, so it does not find a signal that `early` has just
-- stored.
SELECT 'repeated', NULL
FROM windrow.job j
WHERE j.id = ANY (ARRAY[%(id)s::uuid]) AND j.workflow_node = %(node)s AND {{is_blocked(j)}} AND j.checkpoint IS NOT NULL
    AND {{org_of(j)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
UNION ALL
SELECT 'departing', NULL
FROM windrow.departing d
WHERE d.id = ANY (ARRAY[%(id)s::uuid])
    AND {{org_of(d)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
