-- Returns the newest entries of the audit log that match, each with the name of the API key with which the call was
-- made. A parameter that is NULL matches all entries.
SELECT
    a.id::text, a.at, a.principal, a.peer, a.method, a.org, a.queue, a.request::text, a.ended_at, a.outcome,
    a.counts::text, a.calls, k.name AS key_name
FROM windrow.audit a
LEFT JOIN windrow.api_key k ON a.principal LIKE 'key:%%' AND k.id = substr(a.principal, length('key:wr_') + 1)
WHERE a.at >= timestamptz 'epoch' + %(since_us)s * interval '1 us'
    AND (%(org)s::text IS NULL OR a.org = %(org)s)
    AND (%(principal)s::text IS NULL OR a.principal = %(principal)s)
    AND (%(method)s::text IS NULL OR strpos(lower(a.method), lower(%(method)s)) > 0)
ORDER BY a.at DESC, a.id DESC
LIMIT %(rows)s
