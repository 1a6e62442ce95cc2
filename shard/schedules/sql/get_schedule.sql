-- Returns one schedule with the payload of its jobs, and the present time.
SELECT {{schedule_record(s)}}, o.org, s.payload, now() AS now
FROM windrow.schedule s
JOIN windrow.org o ON o.org_id = s.org_id
WHERE o.org = %(org)s AND s.name = %(name)s
