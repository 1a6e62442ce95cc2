-- For an enqueue, which knows its groups: locks their buckets before the first insert. Its jobs then get free slots as
-- they are inserted, and nothing is left to do afterwards. `groups` is empty if no job has one.
CREATE OR REPLACE FUNCTION windrow.lock_groups(queues bigint[], groups text[]) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF groups <> '{}' THEN
        PERFORM windrow.lock_group_buckets(queues, groups);
        PERFORM set_config('windrow.groups_locked', 'on', true);
    END IF;
    RETURN true;
END
$$;
