-- Returns the places of the dedup keys that another session keeps locked. A key is locked if its row is locked, or if
-- the live job that has the key is locked. Waits for no lock. Locks all other keys while it runs.
WITH named AS MATERIALIZED (
    SELECT n.place, n.key, q.queue_id
    FROM unnest(%(orgs)s::text[], %(queues)s::text[], %(keys)s::text[]) WITH ORDINALITY AS n (org, queue, key, place)
    -- OFFSET 0 makes Postgres find the queue by its name, never by a scan of all queues.
    CROSS JOIN LATERAL (SELECT q.queue_id FROM windrow.queue q WHERE q.org = n.org AND q.queue = n.queue OFFSET 0) q
), free AS MATERIALIZED (
    SELECT n.place
    FROM named n
    JOIN windrow.dedup d ON d.queue_id = n.queue_id AND d.key = n.key
    FOR NO KEY UPDATE OF d SKIP LOCKED
), free_live AS MATERIALIZED (
    SELECT n.place
    FROM named n
    JOIN windrow.job j ON j.queue_id = n.queue_id AND j.live_key = n.key
    FOR NO KEY UPDATE OF j SKIP LOCKED
)
SELECT n.place
FROM named n
JOIN windrow.dedup d ON d.queue_id = n.queue_id AND d.key = n.key
WHERE n.place NOT IN (SELECT free.place FROM free)
UNION ALL
SELECT n.place
FROM named n
JOIN windrow.job j ON j.queue_id = n.queue_id AND j.live_key = n.key
WHERE n.place NOT IN (SELECT f.place FROM free_live f)
