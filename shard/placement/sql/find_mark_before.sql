-- The newest mark of this shard that was made before a time, and when it was made.
SELECT m.number, m.made_at
FROM windrow.mark m
WHERE m.made_at < timestamptz 'epoch' + %(before_us)s * interval '1 us'
ORDER BY m.number DESC
LIMIT 1
