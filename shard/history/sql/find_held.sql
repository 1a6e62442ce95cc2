-- Returns a row if a cold day has jobs of orgs under legal hold.
SELECT
FROM windrow.archived a
JOIN windrow.org o ON o.org_id = a.org_id
WHERE a.retention = %(retention)s AND a.day = %(day)s::date AND o.held AND a.jobs > 0
LIMIT 1
