-- The rows of a workflow are only written under its lock, a bucket as in lock_group_buckets. Locks of workflows come
-- before those of groups. Statements that begin after it see what the holders before it have committed: so of the last
-- two parents of a node, the second one sees the first.
CREATE OR REPLACE FUNCTION windrow.lock_workflows(orgs integer[], workflows uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(17, b.bucket)
    FROM (
        SELECT DISTINCT (hashtextextended(n.workflow::text, n.org_id) & 1023)::integer AS bucket
        FROM unnest(orgs, workflows) AS n (org_id, workflow)
        ORDER BY bucket
    ) b;
    -- The close of a slot waits for this transaction from here on, and later ones see that it is closed.
    PERFORM FROM windrow.owned_slot LIMIT 1;
END
$$;
