-- Notes a group whose jobs this transaction has changed, as an element of a JSON array. The setting ends with the
-- transaction.
CREATE OR REPLACE FUNCTION windrow.note_group() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    noted text := current_setting('windrow.groups_noted', true);
BEGIN
    IF TG_OP = 'DELETE' THEN
        noted := set_config(
            'windrow.groups_noted', concat(noted, ',[', OLD.queue_id, ',', to_json(OLD.group_key), ']'), true
        );
    ELSE
        noted := set_config(
            'windrow.groups_noted', concat(noted, ',[', NEW.queue_id, ',', to_json(NEW.group_key), ']'), true
        );
    END IF;
    RETURN NULL;
END
$$;
