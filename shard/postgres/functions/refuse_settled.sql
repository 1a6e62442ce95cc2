-- An enqueue calls this after its insert. It is VOLATILE so that it reads with a new snapshot. The enqueue's own
-- snapshot may be older than the ack that moved an earlier job with the same id from `job` to `finished`. That ack must
-- have committed before the insert could succeed, so this lookup finds the job. It is one statement with one snapshot,
-- so that it cannot miss a job that moves between the tables. It does not read `departing`, because a slot whose jobs
-- depart accepts no jobs.
CREATE OR REPLACE FUNCTION windrow.refuse_settled(ids uuid[], queue_ids bigint[], since timestamptz) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    -- Finds jobs by id alone, and compares orgs afterwards: almost no jobs are found.
    IF EXISTS (
        SELECT
        FROM (
            SELECT f.id, f.queue_id & 4294967295 AS org_id
            FROM windrow.finished f
            WHERE f.id = ANY (ids) AND f.finished_at >= since
            UNION ALL
            SELECT d.id, d.queue_id & 4294967295 FROM windrow.dead d WHERE d.id = ANY (ids)
            UNION ALL
            SELECT c.id, c.org_id FROM windrow.known_cold(ids, since) c
        ) known
        WHERE known.org_id = ANY (ARRAY(
            SELECT n.queue_id & 4294967295 FROM unnest(ids, queue_ids) AS n (id, queue_id) WHERE n.id = known.id
        ))
    )
    THEN
        RAISE EXCEPTION 'a job of this batch has already finished or died' USING ERRCODE = 'WD001';
    END IF;
    RETURN false;
END
$$;
