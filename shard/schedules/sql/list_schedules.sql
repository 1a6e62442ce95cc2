-- Returns a page of an org's schedules by name, without the payloads of their jobs, and the time.
SELECT {{schedule_record(s)}}, o.org, NULL::bytea AS payload, now() AS now
FROM windrow.org o
JOIN windrow.schedule s ON s.org_id = o.org_id
WHERE o.org = %(org)s AND s.name > %(after)s
    AND (%(declared_by)s::text = '' OR s.declared_by = %(declared_by)s::text)
ORDER BY s.name
LIMIT %(rows)s
