-- Returns the workflows of this shard that have not ended and whose numbers are greater than `behind`, in the order of
-- their numbers.
SELECT w.flow, o.org, w.id::text, w.name
FROM windrow.workflow w
JOIN windrow.org o ON o.org_id = w.org_id
WHERE w.flow > %(behind)s AND w.state = 'running' AND o.slot >= 0
ORDER BY w.flow
LIMIT %(rows)s
