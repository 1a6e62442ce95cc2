-- Moves leased jobs to the table dead, for one of three reasons: their last attempt was nacked, an attempt failed
-- permanently, or a claim found that they have no attempt left. In the third case, `outcome` is NULL, and the latest
-- lease does not count as an attempt.
WITH ended AS (
    DELETE FROM windrow.job j
    USING (
        SELECT g.id, g.lease, g.org_position, g.outcome, g.failure, g.log, g.reason
        FROM unnest(
            %(ids)s::uuid[], %(leases)s::bigint[], %(org_positions)s::smallint[], %(outcomes)s::text[],
            %(failures)s::text[], %(logs)s::text[], %(reasons)s::text[]
        ) AS g (id, lease, org_position, outcome, failure, log, reason)
        ORDER BY g.id
    ) b
    -- Finds the job by its id and org: see extend.sql.
    WHERE j.id = ANY (ARRAY[b.id]) AND {{org_of(j)}} = {{org_id_of(b)}}
        AND (j.lease = b.lease AND j.visible_at > now()) IS TRUE
    RETURNING j.*, b.outcome, b.failure, coalesce(b.log, j.log) AS logged, b.reason
)
INSERT INTO windrow.dead ({{job_columns}}, reason)
SELECT
    e.id, e.queue_id, e.enqueued_at, e.run_at, e.lease, e.leased_at, e.expires_at, e.priority,
    CASE WHEN e.outcome IS NULL THEN e.attempt - 1 ELSE e.attempt END,
    e.max_attempts, {{kept_content(e)}},
    CASE WHEN e.outcome IS NULL THEN e.history -> -1 ->> 'worker' ELSE e.worker END,
    CASE
        WHEN e.outcome IS NULL THEN e.history
        ELSE windrow.remember(
            e.history, e.attempt, e.worker, e.leased_at, now(), e.outcome, e.lease, e.failure::jsonb, e.logged
        )
    END,
    e.reason
FROM ended e
RETURNING id::text, lease, CASE WHEN group_key > '' OR lease < 0 THEN ARRAY[queue_id] END
    || CASE WHEN workflow_node > '' THEN ARRAY(SELECT
            windrow.queues_behind(
                queue_id & 4294967295, left(workflow_node, 36)::uuid, ARRAY[substr(workflow_node, 38)::integer]
            )
        ) END
    AS freed_in
