-- Returns the node of this workflow whose job has this lease, if the lease has not ended. Uses clock_timestamp()
-- instead of now(), because the transaction may have waited for the lock of the workflow.
SELECT substr(j.workflow_node, 38)::integer AS node
FROM windrow.job j
WHERE j.id = %(job)s::uuid AND {{org_of(j)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    AND (
        j.lease = %(lease)s AND j.visible_at > clock_timestamp() AND left(j.workflow_node, 36) = %(id)s::uuid::text
    ) IS TRUE
