-- The queues of jobs that may be released when these nodes of a workflow end, for a hint to those who wait for jobs.
CREATE OR REPLACE FUNCTION windrow.queues_behind(org bigint, workflow_id uuid, ended integer[]) RETURNS SETOF bigint
LANGUAGE sql STABLE AS $$
    SELECT DISTINCT j.queue_id
    FROM (
        (
            SELECT n.job_id
            FROM windrow.workflow w
            JOIN windrow.workflow_node n ON n.flow = w.flow AND n.waits_on = ANY (ended)
            WHERE w.org_id = org AND w.id = workflow_id
            LIMIT 100
        )
        UNION ALL
        (
            SELECT n.job_id
            FROM windrow.workflow w
            -- At most 10 callbacks; nodes that were added come after them.
            JOIN windrow.workflow_node n ON n.flow = w.flow AND n.node >= w.nodes AND n.node < w.nodes + 10
                AND n.callback IS NOT NULL
            WHERE w.org_id = org AND w.id = workflow_id AND w.open_node = ANY (ended)
        )
    ) b
    CROSS JOIN LATERAL (
        SELECT j.queue_id FROM windrow.job j WHERE j.id = b.job_id AND j.queue_id & 4294967295 = org OFFSET 0
    ) j
$$;
