-- Rolls back an enqueue that took a dedup key for a job and then did not store the job, because a live job has its id:
-- a job that is not stored must leave no key. The error code is that of refuse_settled: the caller looks up the known
-- jobs and tries again with the others. VOLATILE, so that the planner does not call it.
CREATE OR REPLACE FUNCTION windrow.refuse_unstored_keys() RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RAISE EXCEPTION 'a job of this batch is live already, and its dedup key is free' USING ERRCODE = 'WD001';
END
$$;
