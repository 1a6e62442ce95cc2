-- Returns the node of this workflow whose job a call with this lease has blocked, so that the job waits for other
-- nodes.
SELECT substr(j.workflow_node, 38)::integer AS node
FROM windrow.job j
WHERE j.id = %(job)s::uuid AND {{org_of(j)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    AND (
        {{is_blocked(j)}} AND j.history -> -1 ->> 'lease' = %(lease)s::text
        AND left(j.workflow_node, 36) = %(id)s::uuid::text
    ) IS TRUE
