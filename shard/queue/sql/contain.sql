-- Checks jobs that a claim has just leased. A job is lost if its previous lease had expired. A job ends now (`ends`) if
-- it has no attempt left, or if its expires_at has passed. Records a crash for each kind that has a job which was lost
-- in two attempts in a row, or which was lost and ends now. Sets aside the jobs whose kind is quarantined. Does not set
-- aside jobs that end now, or the kind's trial if the trial was not lost. The present lease of a job that is set aside
-- does not count as an attempt.
--
-- Returns the ids of the jobs that keep their lease, and not the ids of the jobs that were set aside. The reason: if
-- the statement runs again because its answer was lost, it finds no lease on the jobs that the first run has set aside.
WITH leased AS MATERIALIZED (
    SELECT
        j.id, j.queue_id, j.kind, j.leased_at, n.ends, n.lost,
        n.lost AND j.history -> -1 ->> 'outcome' = 'expired'
            AND (n.ends OR j.history -> -2 ->> 'outcome' = 'expired') AS crashed
    FROM unnest(%(ids)s::uuid[], %(lost)s::boolean[], %(ends)s::boolean[]) AS n (id, lost, ends)
    -- The index search uses the id alone; the lease and the org are checked on the row that it finds (see extend.sql).
    CROSS JOIN LATERAL (
        SELECT j.id, j.queue_id, j.kind, j.leased_at, j.history
        FROM windrow.job j
        WHERE j.id = ANY (ARRAY[n.id])
            AND (j.lease = %(lease)s
                AND {{org_of(j)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)) IS TRUE
        OFFSET 0
    ) j
), recorded AS (
    INSERT INTO windrow.crash (queue_id, kind, job_id)
    SELECT DISTINCT ON (l.queue_id, l.kind) l.queue_id, l.kind, l.id
    FROM leased l
    CROSS JOIN LATERAL (SELECT q.quarantine_after FROM windrow.queue q WHERE q.queue_id = l.queue_id OFFSET 0) q
    WHERE l.crashed AND q.quarantine_after IS NOT NULL
        AND NOT EXISTS (SELECT FROM windrow.quarantine k WHERE k.queue_id = l.queue_id AND k.kind = l.kind)
        -- Do not record the crash twice. If the answer of a first run of this statement was lost, the first run has
        -- recorded the crash, perhaps for another of these jobs.
        AND NOT EXISTS (
            SELECT
            FROM windrow.crash c
            WHERE c.queue_id = l.queue_id AND c.kind = l.kind AND c.at >= l.leased_at
                AND c.job_id IN (SELECT x.id FROM leased x)
        )
    ORDER BY l.queue_id, l.kind, l.id
), held AS MATERIALIZED (
    SELECT l.id
    FROM leased l
    CROSS JOIN LATERAL (
        SELECT k.trial_id FROM windrow.quarantine k WHERE k.queue_id = l.queue_id AND k.kind = l.kind OFFSET 0
    ) k
    WHERE NOT l.ends AND (l.lost OR k.trial_id IS DISTINCT FROM l.id)
    ORDER BY l.id
), contained AS (
    UPDATE windrow.job j
    SET attempt = j.attempt - 1, visible_at = 'infinity', lease = NULL, leased_at = NULL, worker = NULL, log = NULL
    FROM held
    WHERE j.id = ANY (ARRAY[held.id])
        AND (j.lease = %(lease)s
            AND {{org_of(j)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)) IS TRUE
)
SELECT l.id::text FROM leased l WHERE l.id NOT IN (SELECT held.id FROM held)
