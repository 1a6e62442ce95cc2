-- Returns how the attempt with this lease ended, by the history; NULL if the history does not contain it.
CREATE OR REPLACE FUNCTION windrow.outcome_of(history jsonb, lease bigint) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT entry ->> 'outcome' FROM jsonb_array_elements(history) entry WHERE entry ->> 'lease' = lease::text
$$;
