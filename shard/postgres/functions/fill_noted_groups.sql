-- Runs when the transaction commits, for each row. The first run fills all noted groups. Workflows are folded before:
-- their locks come first, and released jobs wait for slots.
CREATE OR REPLACE FUNCTION windrow.fill_noted_groups() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    noted text;
    queues bigint[];
    groups text[];
BEGIN
    IF current_setting('windrow.groups_noted', true) <> '' THEN
        PERFORM windrow.fold_noted_workflows();
        noted := current_setting('windrow.groups_noted', true);
        PERFORM set_config('windrow.groups_noted', '', true);
        SELECT array_agg((e ->> 0)::bigint), array_agg(e ->> 1) INTO queues, groups
        FROM jsonb_array_elements(('[' || substr(noted, 2) || ']')::jsonb) e;
        PERFORM windrow.lock_group_buckets(queues, groups);
        PERFORM windrow.fill_group_slots(queues, groups);
    END IF;
    RETURN NULL;
END
$$;
