-- For jobs that an enqueue did not store, or asks for before, by their places: the id under which each is known to this
-- shard, by its own id first, then by its dedup key.
WITH cold AS MATERIALIZED (
    SELECT c.id, c.org_id
    FROM windrow.known_cold(
        %(ids)s::uuid[], least(to_timestamp(%(oldest_ms)s / 1000.0), now()) - interval '2 hours'
    ) c
)
SELECT n.place, known.id::text AS known_as
FROM unnest(%(ids)s::uuid[], %(turns)s::smallint[], %(queues)s::text[], %(dedup_keys)s::text[])
    WITH ORDINALITY AS n (id, turn, queue, dedup_key, place)
CROSS JOIN LATERAL (
    SELECT j.id
    FROM windrow.job j
    WHERE j.id = n.id AND j.queue_id & 4294967295 = (SELECT windrow.org_ids(%(orgs)s::text[]))[coalesce(n.turn, 1)]
    UNION ALL
    SELECT d.id
    FROM windrow.dead d
    WHERE d.id = n.id AND d.queue_id & 4294967295 = (SELECT windrow.org_ids(%(orgs)s::text[]))[coalesce(n.turn, 1)]
    UNION ALL
    SELECT d.id
    FROM windrow.departing d
    WHERE d.id = n.id AND d.queue_id & 4294967295 = (SELECT windrow.org_ids(%(orgs)s::text[]))[coalesce(n.turn, 1)]
    UNION ALL
    SELECT f.id
    FROM windrow.finished f
    WHERE f.id = n.id AND f.queue_id & 4294967295 = (SELECT windrow.org_ids(%(orgs)s::text[]))[coalesce(n.turn, 1)]
        AND f.finished_at >= least(to_timestamp(%(oldest_ms)s / 1000.0), now()) - interval '2 hours'
    UNION ALL
    SELECT c.id
    FROM cold c
    WHERE c.id = n.id AND c.org_id = (SELECT windrow.org_ids(%(orgs)s::text[]))[coalesce(n.turn, 1)]
    UNION ALL
    SELECT d.job_id
    -- OFFSET 0 fence: by its name alone, never by a walk through all queues or keys.
    FROM (
        SELECT q.queue_id
        FROM windrow.queue q
        WHERE q.org = (%(orgs)s::text[])[coalesce(n.turn, 1)] AND q.queue = n.queue
        OFFSET 0
    ) q
    JOIN windrow.dedup d ON d.queue_id = q.queue_id AND d.key = n.dedup_key AND d.until > now()
    LIMIT 1
) known
-- A commit that was interrupted while it waited for its standby is seen by all, and a failover may still lose it. What is
-- said because of it must wait as it did: so does a transaction that has written something.
WHERE (SELECT pg_logical_emit_message(true, 'windrow', '')) IS NOT NULL
