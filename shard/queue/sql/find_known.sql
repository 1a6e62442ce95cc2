-- Finds out which of these new jobs the shard knows already, before an enqueue, or after an enqueue that did not store
-- them. Returns for each job that is known its place in the arrays, and the id of the known job. The known job has the
-- same id or, if there is no such job, the same dedup key.
WITH cold AS MATERIALIZED (
    SELECT c.id, c.org_id
    FROM windrow.known_cold(
        %(ids)s::uuid[], least(to_timestamp(%(oldest_ms)s / 1000.0), now()) - interval '2 hours'
    ) c
)
SELECT n.place, known.id::text AS known_as
FROM unnest(%(ids)s::uuid[], %(org_positions)s::smallint[], %(queues)s::text[], %(dedup_keys)s::text[], %(live_keys)s::text[])
    WITH ORDINALITY AS n (id, org_position, queue, dedup_key, live_key, place)
CROSS JOIN LATERAL (
    SELECT j.id
    FROM windrow.job j
    WHERE j.id = n.id AND {{org_of(j)}} = {{org_id_of(n)}}
    UNION ALL
    SELECT d.id
    FROM windrow.dead d
    WHERE d.id = n.id AND {{org_of(d)}} = {{org_id_of(n)}}
    UNION ALL
    SELECT d.id
    FROM windrow.departing d
    WHERE d.id = n.id AND {{org_of(d)}} = {{org_id_of(n)}}
    UNION ALL
    SELECT f.id
    FROM windrow.finished f
    WHERE f.id = n.id AND {{org_of(f)}} = {{org_id_of(n)}}
        AND f.finished_at >= least(to_timestamp(%(oldest_ms)s / 1000.0), now()) - interval '2 hours'
    UNION ALL
    SELECT c.id
    FROM cold c
    WHERE c.id = n.id AND c.org_id = {{org_id_of(n)}}
    UNION ALL
    SELECT keyed.job_id
    -- OFFSET 0 makes Postgres find the queue by its name, never by a scan of all queues or keys.
    FROM (
        SELECT q.queue_id
        FROM windrow.queue q
        WHERE q.org = (%(orgs)s::text[])[coalesce(n.org_position, 1)] AND q.queue = n.queue
        OFFSET 0
    ) q
    CROSS JOIN LATERAL (
        SELECT d.job_id
        FROM windrow.dedup d
        WHERE d.queue_id = q.queue_id AND d.key = n.dedup_key AND d.until > now()
        UNION ALL
        SELECT j.id
        FROM windrow.job j
        WHERE j.queue_id = q.queue_id AND j.live_key = n.live_key
        UNION ALL
        SELECT d.id
        FROM windrow.departing d
        WHERE d.queue_id = q.queue_id AND d.live_key = n.live_key AND d.reason IS NULL
    ) keyed
    LIMIT 1
) known
-- If a commit's wait for the synchronous standby was interrupted, the commit is visible, but a failover may still lose
-- it. An answer that relies on such a commit must also wait for the standby. Only a transaction that has written
-- something waits, so this statement writes a message to the WAL.
WHERE (SELECT pg_logical_emit_message(true, 'windrow', '')) IS NOT NULL
