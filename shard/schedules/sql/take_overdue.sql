-- Locks schedules that have buffered runs, or undecided instants that have passed. Returns schedules with ids after
-- `behind`, in the order of their ids. Leaves out schedules that are paused, and schedules of slots that this shard
-- does not own.
SELECT s.id::text, o.org, s.name, {{schedule_spec(s)}}, s.next_at, s.buffered, now() AS now
FROM windrow.schedule s
JOIN windrow.org o ON o.org_id = s.org_id
JOIN windrow.owned_slot w ON w.slot = o.slot
WHERE w.state = 'owned' AND s.id > %(behind)s::uuid AND s.paused_at IS NULL AND (s.next_at <= now() OR s.buffered > 0)
ORDER BY s.id
LIMIT %(rows)s
FOR UPDATE OF s
