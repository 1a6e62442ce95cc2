-- Deletes from the source the ends of nodes that were copied to the target.
DELETE FROM windrow.workflow_arrival a
USING
    unnest(%(orgs)s::text[], %(workflows)s::uuid[], %(numbers)s::bigint[]) AS n (org, workflow, number),
    LATERAL (SELECT o.org_id FROM windrow.org o WHERE o.org = n.org OFFSET 0) o
WHERE a.org_id = o.org_id AND a.workflow = n.workflow AND a.number = n.number
