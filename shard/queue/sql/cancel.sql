-- Cancels jobs that have not finished, including leased and dead jobs. Returns the cancelled jobs, with the leases that
-- ended, and with the queues in which other jobs may have become ready because of groups, workflows or limits of jobs
-- in flight. Also returns the jobs that are on their way to another shard (departing), which it does not change.
WITH live AS (
    DELETE FROM windrow.job j
    WHERE j.id = ANY (%(ids)s::uuid[])
        AND {{org_of(j)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    RETURNING j.*
), aside AS (
    DELETE FROM windrow.dead d
    WHERE d.id = ANY (%(ids)s::uuid[])
        AND {{org_of(d)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    RETURNING {{job_columns}}
), cancelled AS (
    INSERT INTO windrow.finished ({{job_columns}}, state, reason, finished_at, retention)
    SELECT
        ended.*, 'cancelled', %(reason)s,
        {{finish_time}},
        {{retention_of(ended)}}
    FROM (
        SELECT
            {{cancelled_columns(l)}},
            CASE
                WHEN l.lease IS NOT NULL AND l.visible_at > now() THEN windrow.remember(l.history, l.attempt, l.worker, l.leased_at, now(), 'cancelled', l.lease, NULL, l.log)
                ELSE {{history_with_lost(l)}}
            END AS history
        FROM live l
        UNION ALL
        SELECT {{job_columns(a)}} FROM aside a
    ) ended
    RETURNING 1
)
-- The lists are not joined, because a join would compare each of 1,000 jobs with all other jobs.
SELECT
    l.id::text, false AS departing, CASE WHEN l.visible_at > now() THEN l.lease END AS ended_lease, l.worker,
    CASE WHEN l.group_key > '' OR l.lease < 0 THEN ARRAY[l.queue_id] END
        || CASE WHEN l.workflow_node > '' THEN ARRAY(SELECT
            windrow.queues_behind(
                {{org_of(l)}}, left(l.workflow_node, 36)::uuid, ARRAY[substr(l.workflow_node, 38)::integer]
            )
        ) END
        AS freed_in
FROM live l
UNION ALL
SELECT a.id::text, false, NULL, NULL, NULL FROM aside a
UNION ALL
SELECT d.id::text, true, NULL, NULL, NULL
FROM windrow.departing d
WHERE d.id = ANY (%(ids)s::uuid[])
    AND {{org_of(d)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
