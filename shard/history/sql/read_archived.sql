-- Returns how many cold jobs of this day (YYYY-MM-DD) and retention each org has, according to the books. Leaves out
-- orgs that are being erased.
SELECT coalesce(o.org, 'unknown org ' || a.org_id) AS org, a.jobs
FROM windrow.archived a
LEFT JOIN windrow.org o ON o.org_id = a.org_id
WHERE a.retention = %(retention)s AND a.day = %(day)s::date AND o.slot IS DISTINCT FROM -1
ORDER BY 1
