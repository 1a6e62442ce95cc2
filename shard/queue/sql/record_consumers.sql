-- Records that consumers look for jobs of these queues, with a row for each kind that they take. Does not change rows
-- that are younger than 45 s. So all routers together write each row about once a minute. A queue that has rows for 100
-- kinds or more gets no rows for more kinds. Instead, a consumer of another kind is recorded as a consumer of all
-- kinds, because otherwise that kind would seem to have no consumer. The rows are ordered, so that all routers lock
-- them in the same order.
INSERT INTO windrow.consumer_seen (queue_id, kind, at)
SELECT DISTINCT q.queue_id, CASE WHEN q.seen_at IS NULL AND q.kinds >= 100 THEN '' ELSE n.kind END, now()
FROM unnest(%(orgs)s::text[], %(queues)s::text[], %(kinds)s::text[]) AS n (org, queue, kind)
-- OFFSET 0 makes Postgres find the queue by its name, never by a scan of all queues.
CROSS JOIN LATERAL (
    SELECT
        q.queue_id,
        (SELECT s.at FROM windrow.consumer_seen s WHERE s.queue_id = q.queue_id AND s.kind = n.kind) AS seen_at,
        (SELECT count(*) FROM windrow.consumer_seen s WHERE s.queue_id = q.queue_id) AS kinds
    FROM windrow.queue q
    WHERE q.org = n.org AND q.queue = n.queue
    OFFSET 0
) q
WHERE q.seen_at IS NULL OR q.seen_at < now() - interval '45 s'
ORDER BY 1, 2
ON CONFLICT (queue_id, kind) DO UPDATE SET at = excluded.at
