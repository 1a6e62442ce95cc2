-- Locks the buckets of groups. Only routers of the release before call it; the jobs that they store get their slots at
-- the commit. `groups` is empty if no job has one.
CREATE OR REPLACE FUNCTION windrow.lock_groups(queues bigint[], groups text[]) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF groups <> '{}' THEN
        PERFORM windrow.lock_group_buckets(queues, groups);
    END IF;
    RETURN true;
END
$$;
