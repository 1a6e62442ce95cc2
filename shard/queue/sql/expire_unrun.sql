-- Cancels jobs that a claim has leased although their expires_at has passed. The lease of that claim does not count as
-- an attempt.
WITH ended AS (
    DELETE FROM windrow.job j
    WHERE j.id = ANY (%(ids)s::uuid[]) AND j.lease = %(lease)s AND j.expires_at <= now()
        AND {{org_of(j)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    RETURNING j.*
)
INSERT INTO windrow.finished (
    id, queue_id, enqueued_at, run_at, expires_at, priority, attempt, max_attempts,
    {{kept_content}}, history, state, reason, finished_at, retention
)
SELECT
    e.id, e.queue_id, e.enqueued_at, e.run_at, e.expires_at, e.priority, e.attempt - 1, e.max_attempts,
    {{kept_content(e)}}, e.history, 'cancelled', {{expiry_reason(e)}},
    {{finish_time}},
    {{retention_of(e)}}
FROM ended e
RETURNING id::text, CASE WHEN group_key > '' OR %(lease)s::bigint < 0 THEN ARRAY[queue_id] END
    || CASE WHEN workflow_node > '' THEN ARRAY(SELECT
            windrow.queues_behind(
                queue_id & 4294967295, left(workflow_node, 36)::uuid, ARRAY[substr(workflow_node, 38)::integer]
            )
        ) END
    AS freed_in
