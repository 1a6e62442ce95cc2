-- Returns the newest mark that this shard made before a given time, and when the shard made this mark.
SELECT m.number, m.made_at
FROM windrow.mark m
WHERE m.made_at < timestamptz 'epoch' + %(before_us)s * interval '1 us'
ORDER BY m.number DESC
LIMIT 1
