-- The newest mark that this shard made before a given time, and the time at which it was made.
SELECT m.number, m.made_at
FROM windrow.mark m
WHERE m.made_at < timestamptz 'epoch' + %(before_us)s * interval '1 us'
ORDER BY m.number DESC
LIMIT 1
