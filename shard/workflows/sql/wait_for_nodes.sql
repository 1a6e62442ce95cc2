-- Ends the lease of a job, without counting the attempt, and blocks the job until its workflow releases it. The node
-- waits for the last of its parents that has not ended. If `is_doomed` is true, the node waits for no parent, and the
-- next fold cancels the job. Returns the queue of the job, the number of changed nodes, and the name of the node. The
-- number is 0 if the node has ended, which happens if its job was redriven. Returns no row if another session has
-- locked the job, or if the lease has ended. Never waits for a lock, because the caller holds the lock of the workflow.
WITH held AS MATERIALIZED (
    SELECT j.ctid
    FROM windrow.job j
    WHERE j.id = %(job)s::uuid AND {{org_of(j)}} = %(org_id)s
        AND (j.lease = %(lease)s AND j.visible_at > clock_timestamp()) IS TRUE
    FOR UPDATE SKIP LOCKED
), node AS (
    UPDATE windrow.workflow_node n
    SET
        state = CASE WHEN %(is_doomed)s THEN 'doomed' ELSE 'blocked' END,
        waits_on = CASE
            WHEN NOT %(is_doomed)s THEN (
                SELECT max(e.parent)
                -- OFFSET 0 makes Postgres find edges and parents by the node's number, never by scans of all edges.
                FROM (SELECT e.parent FROM windrow.workflow_edge e WHERE e.flow = n.flow AND e.node = n.node OFFSET 0) e
                CROSS JOIN LATERAL (
                    SELECT FROM windrow.workflow_node p
                    WHERE p.flow = n.flow AND p.node = e.parent AND p.ended_at IS NULL
                    OFFSET 0
                ) p
            )
        END,
        -- The node's run_at and delay applied to its first release. They must not delay the job a second time.
        run_at = NULL, delay_us = NULL
    WHERE n.flow = %(flow)s AND n.node = %(node)s AND n.state = 'released'
    RETURNING n.node
)
UPDATE windrow.job j
SET
    history = windrow.remember(
        j.history, j.attempt, j.worker, j.leased_at, clock_timestamp(), 'released', j.lease, %(failure)s::jsonb, j.log
    ),
    attempt = j.attempt - 1, run_at = 'infinity', visible_at = 'infinity', group_slot = NULL,
    lease = NULL, leased_at = NULL, worker = NULL, log = NULL
-- Do not use a join: see claim.sql.
WHERE j.ctid = ANY (ARRAY(SELECT h.ctid FROM held h))
RETURNING
    j.queue_id, (SELECT count(*) FROM node) AS changed,
    (SELECT n.name FROM windrow.workflow_node n WHERE n.flow = %(flow)s AND n.node = %(node)s) AS name
