-- Returns the digest of the request that stored this workflow.
SELECT w.digest
FROM windrow.workflow w
JOIN windrow.org o ON o.org_id = w.org_id
WHERE o.org = %(org)s AND w.id = %(id)s::uuid
