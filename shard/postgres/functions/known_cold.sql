-- Returns the ids and orgs of cold jobs, also of deleted ones whose ids are still known (past_id).
CREATE OR REPLACE FUNCTION windrow.known_cold(ids uuid[], since timestamptz) RETURNS TABLE (id uuid, org_id bigint)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF since < (SELECT a.until FROM windrow.archive a) THEN
        RETURN QUERY EXECUTE
            'SELECT c.id, c.queue_id & 4294967295 FROM windrow.cold c WHERE c.id = ANY ($1) AND c.finished_at >= $2'
            USING ids, since;
        RETURN QUERY SELECT p.id, p.org_id::bigint FROM windrow.past_id p WHERE p.id = ANY (ids);
    END IF;
END
$$;
