-- A new job of a group waits, unless its bucket is locked and the group has a free slot and no job that waits. Jobs
-- that have become due are not overtaken by the new one.
CREATE OR REPLACE FUNCTION windrow.wait_for_slot() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    is_first boolean := current_setting('windrow.groups_locked', true) = 'on';
BEGIN
    IF is_first AND EXISTS (
        SELECT FROM windrow.job d
        WHERE d.queue_id = NEW.queue_id AND d.group_key = NEW.group_key AND d.group_slot IS NULL
            AND isfinite(d.visible_at) AND d.run_at < NEW.run_at
    ) THEN
        -- If another session has locked that job, no slot is given: the new job waits, too.
        is_first := windrow.fill_group_slots(ARRAY[NEW.queue_id], ARRAY[NEW.group_key]) > 0;
    END IF;
    IF is_first AND NOT EXISTS (
        SELECT FROM windrow.job w
        WHERE w.queue_id = NEW.queue_id AND w.group_key = NEW.group_key AND w.group_slot IS NULL
            AND NOT isfinite(w.visible_at) AND isfinite(w.run_at)
    ) THEN
        SELECT s.slot INTO NEW.group_slot
        FROM windrow.queue q
        JOIN windrow.owned_slot o ON o.slot = q.slot AND o.state = 'owned' AND NOT o.arriving
        CROSS JOIN generate_series(1, coalesce(q.group_concurrency, 1)) AS s (slot)
        WHERE q.queue_id = NEW.queue_id AND NOT EXISTS (
            SELECT FROM windrow.job h
            WHERE h.queue_id = NEW.queue_id AND h.group_key = NEW.group_key AND h.group_slot = s.slot::smallint
            OFFSET 0
        )
        LIMIT 1;
    END IF;
    IF NEW.group_slot IS NULL THEN
        NEW.visible_at := 'infinity';
    END IF;
    RETURN NEW;
END
$$;
