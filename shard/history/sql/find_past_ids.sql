-- Returns the partitions whose ids are so old that enqueues with them are refused.
SELECT c.relname
FROM pg_inherits i
JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'windrow.past_id'::regclass AND c.relname ~ '^past_id_\d{8}$'
    AND to_date(right(c.relname, 8), 'YYYYMMDD') + 1 <= (now() - interval '7 days 3 hours') AT TIME ZONE 'UTC'
ORDER BY 1
