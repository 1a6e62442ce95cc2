-- Returns the schedules of this shard with ids after `behind`, in the order of their ids.
SELECT s.id::text, o.org, s.name, {{schedule_spec(s)}}, s.next_at, s.buffered, now() AS now, s.paused_at IS NOT NULL AS paused
FROM windrow.schedule s
JOIN windrow.org o ON o.org_id = s.org_id
WHERE s.id > %(behind)s::uuid AND o.slot >= 0
ORDER BY s.id
LIMIT %(rows)s
