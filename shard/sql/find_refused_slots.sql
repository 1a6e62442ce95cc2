-- Which of these slots this shard does not take jobs for, and since which epoch.
SELECT s.slot, coalesce(o.state, 'foreign') AS state, coalesce(o.epoch, 0) AS epoch
FROM unnest(%(slots)s::smallint[]) AS s (slot)
LEFT JOIN windrow.owned_slot o ON o.slot = s.slot
WHERE o.state IS DISTINCT FROM 'owned'
