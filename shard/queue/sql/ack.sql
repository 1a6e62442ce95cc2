-- Finishes leased jobs: moves them from the table job to the day's partition of the table finished. An attempt that has
-- logged something gets an entry in the history. For other attempts, lookups make the entry from the job's columns.
-- Returns one row: the number of finished jobs, the ids and leases of the finished jobs (NULL if all jobs were found),
-- and the queues in which other jobs may have become ready because of groups, workflows or limits of jobs in flight.
WITH ended AS (
    DELETE FROM windrow.job j
    USING (
        -- The jobs are ordered by id, as in all statements that end leases, so that calls about the same jobs cannot
        -- deadlock.
        SELECT n.id, n.lease, n.org_position, n.result, n.log
        FROM unnest(
            %(ids)s::uuid[], %(leases)s::bigint[], %(org_positions)s::smallint[], %(results)b::bytea[], %(logs)s::text[]
        ) AS n (id, lease, org_position, result, log)
        ORDER BY n.id
    ) a
    -- Finds the job by its id and org: see extend.sql.
    WHERE j.id = ANY (ARRAY[a.id]) AND {{org_of(j)}} = {{org_id_of(a)}}
        AND (j.lease = a.lease AND j.visible_at > now()) IS TRUE
    RETURNING j.*, a.result, coalesce(a.log, j.log) AS logged
), moved AS (
    INSERT INTO windrow.finished ({{job_columns}}, state, result, finished_at, retention)
    SELECT
        {{columns_but_history(e)}},
        CASE
            WHEN e.logged IS NULL THEN e.history
            ELSE windrow.remember(e.history, e.attempt, e.worker, e.leased_at, now(), 'acked', e.lease, NULL, e.logged)
        END,
        'succeeded', e.result, {{finish_time}}, {{retention_of(e)}}
    FROM ended e
    RETURNING id, lease
)
SELECT
    count(*) AS acked,
    -- These are subqueries, because aggregates at the level of the count would be computed over all rows even if they
    -- are not needed.
    CASE WHEN count(*) < %(jobs)s THEN (SELECT array_agg(m.id::text) FROM moved m) END AS acked_ids,
    CASE WHEN count(*) < %(jobs)s THEN (SELECT array_agg(m.lease) FROM moved m) END AS acked_leases,
    (
        SELECT array_agg(DISTINCT f.queue_id)
        FROM (
            SELECT e.queue_id FROM ended e WHERE e.group_key > '' OR e.lease < 0
            UNION ALL
            SELECT windrow.queues_behind(w.org_id, w.id, w.nodes)
            FROM (
                SELECT
                    {{org_of(e)}} AS org_id, left(e.workflow_node, 36)::uuid AS id,
                    array_agg(substr(e.workflow_node, 38)::integer) AS nodes
                FROM ended e
                WHERE e.workflow_node > ''
                GROUP BY 1, 2
            ) w
        ) f
    ) AS freed_in
FROM moved
