-- Returns the workflow that retries the given workflow.
SELECT w.id::text
FROM windrow.workflow w
JOIN windrow.org o ON o.org_id = w.org_id
WHERE o.org = %(org)s AND w.retry_of = %(id)s::uuid
