-- Returns cold jobs by id; none if `since` is after all cold days. Only jobs of this org; NULL: of any org. EXECUTE
-- plans for each call, so that the days before `since` are neither planned for nor locked.
CREATE OR REPLACE FUNCTION windrow.find_cold(ids uuid[], since timestamptz, org bigint) RETURNS SETOF windrow.cold
LANGUAGE plpgsql STABLE AS $$
DECLARE
    rest timestamptz := since;
    found bigint;
BEGIN
    IF since >= (SELECT a.until FROM windrow.archive a) THEN
        RETURN;
    END IF;
    -- Most jobs finish on the day on which they were made, or the next. Planning for all days since then would take
    -- longer than the lookup itself. An org has only one job with an id, so the lookup ends once all ids are found.
    IF org IS NOT NULL THEN
        rest := since + interval '1 day';
        RETURN QUERY EXECUTE
            'SELECT c.* FROM windrow.cold c '
            'WHERE c.id = ANY ($1) AND c.queue_id & 4294967295 = $4 AND c.finished_at >= $2 AND c.finished_at < $3'
            USING ids, since, rest, org;
        GET DIAGNOSTICS found = ROW_COUNT;
        IF found = cardinality(ids) THEN
            RETURN;
        END IF;
    END IF;
    RETURN QUERY EXECUTE
        'SELECT c.* FROM windrow.cold c '
        'WHERE c.id = ANY ($1) AND ($3 IS NULL OR c.queue_id & 4294967295 = $3) AND c.finished_at >= $2'
        USING ids, rest, org;
END
$$;
