-- Folds the workflows that the transaction has noted.
CREATE OR REPLACE FUNCTION windrow.fold_noted_workflows() RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    noted text := current_setting('windrow.workflows_noted', true);
    orgs integer[];
    workflows uuid[];
BEGIN
    IF noted <> '' THEN
        PERFORM set_config('windrow.workflows_noted', '', true);
        SELECT array_agg((e ->> 0)::integer), array_agg((e ->> 1)::uuid) INTO orgs, workflows
        FROM jsonb_array_elements(('[' || substr(noted, 2) || ']')::jsonb) e;
        PERFORM windrow.fold_workflows(orgs, workflows);
    END IF;
END
$$;
