-- Called after stray dead jobs were stored (bring_home.sql), for the same reason as refuse_settled: it reads with a new
-- snapshot, and fails if one of the jobs is live or finished.
CREATE OR REPLACE FUNCTION windrow.refuse_revived(ids uuid[], queue_ids bigint[], since timestamptz) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF EXISTS (
        SELECT
        FROM (
            SELECT j.id, j.queue_id & 4294967295 AS org_id FROM windrow.job j WHERE j.id = ANY (ids)
            UNION ALL
            SELECT f.id, f.queue_id & 4294967295
            FROM windrow.finished f
            WHERE f.id = ANY (ids) AND f.finished_at >= since
            UNION ALL
            SELECT c.id, c.org_id FROM windrow.known_cold(ids, since) c
        ) known
        WHERE known.org_id = ANY (ARRAY(
            SELECT n.queue_id & 4294967295 FROM unnest(ids, queue_ids) AS n (id, queue_id) WHERE n.id = known.id
        ))
    )
    THEN
        RAISE EXCEPTION 'a job of this batch has already finished or lives' USING ERRCODE = 'WD001';
    END IF;
    RETURN false;
END
$$;
