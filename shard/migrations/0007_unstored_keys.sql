-- Rolls back an enqueue that took a dedup key for a job and then did not store the job, because another enqueue had stored it
-- after the snapshot of the statement was taken. VOLATILE: the planner must not call it. The error code is that of
-- refuse_settled: the caller looks up what is known, and tries again with the rest.
CREATE FUNCTION windrow.refuse_unstored_keys() RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RAISE EXCEPTION 'a job of this batch has been stored by another enqueue meanwhile' USING ERRCODE = 'WD001';
END
$$;
