-- Locks groups, and gives their free slots to jobs that wait. Returns how many jobs got slots.
CREATE OR REPLACE FUNCTION windrow.fill_groups(queues bigint[], groups text[]) RETURNS integer
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM windrow.lock_group_buckets(queues, groups);
    RETURN windrow.fill_group_slots(queues, groups);
END
$$;
