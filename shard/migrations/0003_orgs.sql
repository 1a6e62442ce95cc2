-- The numbers of orgs, in the order of their names; NULL where there is no such org. For statements that are about the
-- leases of several orgs at once: each lease says by its place in this list whose it must be (I4).
CREATE FUNCTION windrow.org_ids(orgs text[]) RETURNS integer[]
LANGUAGE sql STABLE AS $$
    SELECT array_agg((SELECT o.org_id FROM windrow.org o WHERE o.org = n.org) ORDER BY n.turn)
    FROM unnest(orgs) WITH ORDINALITY AS n (org, turn)
$$;
