-- Forgets consumers that were not seen for a day. Reads the whole table, which is small.
DELETE FROM windrow.consumer_seen s WHERE s.at < now() - interval '1 day'
