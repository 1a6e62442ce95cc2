-- Rolls back an enqueue that took a dedup key for a job and then did not store the job, because the job is live already: what
-- is not stored must leave no key. The caller looks up what is known and tries again with the rest, as after refuse_settled,
-- whose error code this is. VOLATILE: the planner must not call it.
CREATE FUNCTION windrow.refuse_unstored_keys() RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RAISE EXCEPTION 'a job of this batch is live already, and its dedup key is free' USING ERRCODE = 'WD001';
END
$$;
