-- Records consumers that look for jobs of the queues with these names in all orgs, as record_consumers.sql does. The
-- rows have the id that a queue of org number 0 would have. No org has this number.
INSERT INTO windrow.consumer_seen (queue_id, kind, at)
SELECT DISTINCT q.queue_id, CASE WHEN q.seen_at IS NULL AND q.kinds >= 100 THEN '' ELSE n.kind END, now()
FROM unnest(%(queues)s::text[], %(kinds)s::text[]) AS n (queue, kind)
-- OFFSET 0 makes Postgres find the name by its text, never by a scan of all names.
CROSS JOIN LATERAL (
    SELECT
        every.queue_id,
        (SELECT s.at FROM windrow.consumer_seen s WHERE s.queue_id = every.queue_id AND s.kind = n.kind) AS seen_at,
        (SELECT count(*) FROM windrow.consumer_seen s WHERE s.queue_id = every.queue_id) AS kinds
    FROM (SELECT w.name_id::bigint << 32 AS queue_id FROM windrow.queue_name w WHERE w.queue = n.queue OFFSET 0) every
    OFFSET 0
) q
WHERE q.seen_at IS NULL OR q.seen_at < now() - interval '45 s'
ORDER BY 1, 2
ON CONFLICT (queue_id, kind) DO UPDATE SET at = excluded.at
