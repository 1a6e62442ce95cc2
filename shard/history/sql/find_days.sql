-- Returns the partitions of `kind` (`finished` or `cold`) that are due, the oldest first. Each partition has one
-- retention and one UTC day. A finished partition is due when its day has been over for three hours. A cold partition
-- is due when, in addition, its retention has passed. To find a repeated id, an enqueue searches the jobs that finished
-- later than two hours before the id was made. Because a day turns cold only after three hours, an enqueue need not
-- search the cold jobs for a new id. An enqueue may repeat an id for seven days. `repeatable` adds a margin of three
-- hours to these days.
SELECT
    c.relname, d.retention, to_char(d.day, 'YYYY-MM-DD'), to_char(d.day + 1, 'YYYY-MM-DD'),
    to_regclass('windrow.cold_' || d.retention || '_' || to_char(d.day, 'YYYYMMDD')) IS NOT NULL AS cold_already,
    (SELECT k.convalidated FROM pg_constraint k WHERE k.conrelid = c.oid AND k.conname = 'of_its_day') AS proved,
    d.day + 1 > (now() - interval '7 days 3 hours') AT TIME ZONE 'UTC' AS repeatable
FROM pg_inherits i
JOIN pg_class c ON c.oid = i.inhrelid
JOIN pg_class p ON p.oid = i.inhparent
CROSS JOIN LATERAL (
    SELECT
        split_part(c.relname, '_', 2)::smallint AS retention, to_date(split_part(c.relname, '_', 3), 'YYYYMMDD') AS day
    OFFSET 0
) d
WHERE p.relnamespace = 'windrow'::regnamespace AND p.relname ~ ('^' || %(kind)s::text || '_\d+$')
    AND c.relname ~ ('^' || %(kind)s::text || '_\d+_\d{8}$')
    AND d.day + 1 + CASE WHEN %(kind)s::text = 'cold' THEN d.retention ELSE 0 END
        <= (now() - interval '3 hours') AT TIME ZONE 'UTC'
ORDER BY d.day, d.retention
