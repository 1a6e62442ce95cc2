-- Returns the numbers of orgs, in the order of the given names; NULL where there is no such org. Statements about
-- leases of several orgs use it: for each lease they get the position in this list of the org that must own it (I4).
CREATE OR REPLACE FUNCTION windrow.org_ids(orgs text[]) RETURNS integer[]
LANGUAGE sql STABLE AS $$
    SELECT array_agg((SELECT o.org_id FROM windrow.org o WHERE o.org = n.org) ORDER BY n.position)
    FROM unnest(orgs) WITH ORDINALITY AS n (org, position)
$$;
