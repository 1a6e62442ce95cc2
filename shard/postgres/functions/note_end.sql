-- Appends the end of a node's job to the arrivals of its workflow, and notes the workflow, as an element of a JSON
-- array. The setting ends with the transaction. Passes over rows that only move to another partition
-- (keep_finished.sql).
CREATE OR REPLACE FUNCTION windrow.note_end() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    org integer := NEW.queue_id & 4294967295;
    noted text := current_setting('windrow.workflows_noted', true);
    entry text := ',[' || org || ',"' || left(NEW.workflow_node, 36) || '"]';
BEGIN
    IF current_setting('windrow.history_moves', true) = 'on' THEN
        RETURN NULL;
    END IF;
    IF noted IS NULL OR strpos(noted, entry) = 0 THEN
        PERFORM set_config('windrow.workflows_noted', concat(noted, entry), true);
    END IF;
    INSERT INTO windrow.workflow_arrival (org_id, workflow, node, how, is_first)
    VALUES (
        org, left(NEW.workflow_node, 36)::uuid, substr(NEW.workflow_node, 38)::integer, TG_ARGV[0],
        coalesce(noted, '') = ''
    );
    RETURN NULL;
END
$$;
