-- A job of a group that becomes due without a slot waits. The fill at the commit gives it a slot if one is free.
CREATE OR REPLACE FUNCTION windrow.wait_for_slot() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    NEW.visible_at := 'infinity';
    RETURN NEW;
END
$$;
