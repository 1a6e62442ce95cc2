-- Runs when the transaction commits, for each arrival. The first run folds all workflows that were noted.
CREATE OR REPLACE FUNCTION windrow.fold_at_commit() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM windrow.fold_noted_workflows();
    RETURN NULL;
END
$$;
