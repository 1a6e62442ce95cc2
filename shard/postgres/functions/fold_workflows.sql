-- Takes in what these workflows have left. If not all of it fits into a portion, tells the routers to go on. Returns
-- the queues of the released jobs. Waits for the locks of the workflows.
CREATE OR REPLACE FUNCTION windrow.fold_workflows(orgs integer[], workflows uuid[]) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    folded record;
BEGIN
    PERFORM windrow.lock_workflows(orgs, workflows);
    SELECT * INTO folded FROM windrow.fold_portion(orgs, workflows);
    IF folded.is_left THEN
        -- A notification holds less than 8,000 bytes.
        PERFORM pg_notify('windrow_work', 'fold ' || string_agg(l.org_id || '/' || l.workflow, ','))
        FROM (
            SELECT n.org_id, n.workflow, row_number() OVER () / 100 AS part
            FROM unnest(orgs, workflows) AS n (org_id, workflow)
            JOIN windrow.workflow w ON w.org_id = n.org_id AND w.id = n.workflow
            WHERE EXISTS (
                SELECT FROM windrow.workflow_arrival a WHERE a.org_id = n.org_id AND a.workflow = n.workflow OFFSET 0
            ) OR EXISTS (
                SELECT FROM windrow.workflow_node d WHERE d.flow = w.flow AND d.is_left OFFSET 0
            )
        ) l
        GROUP BY l.part;
    END IF;
    RETURN folded.released;
END
$$;
