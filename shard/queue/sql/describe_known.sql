-- Describes known jobs that an enqueue found instead of storing duplicates. Returns for each job its place in the
-- arrays, its state, and whether it differs from the job that was sent with its id. `digest` is the SHA-256 of the
-- queue, kind and payload that were sent. NULL: no job was sent with this id. Returns no row for jobs that were deleted
-- meanwhile.
WITH cold AS MATERIALIZED (
    SELECT c.*
    FROM windrow.find_cold(
        %(ids)s::uuid[], least(to_timestamp(%(oldest_ms)s / 1000.0), now()) - interval '2 hours', NULL
    ) c
)
SELECT
    n.place, found.state,
    CASE
        WHEN n.digest IS NULL THEN false
        ELSE encode(sha256(convert_to(q.queue || ' ' || found.kind || ' ', 'UTF8') || found.payload), 'hex') <> n.digest
    END AS differs
FROM unnest(%(ids)s::uuid[], %(org_positions)s::smallint[], %(digests)s::text[])
    WITH ORDINALITY AS n (id, org_position, digest, place)
CROSS JOIN LATERAL (
    SELECT
        j.queue_id, j.kind, j.payload,
        CASE
            WHEN {{is_due(j)}} THEN 'ready'
            WHEN {{is_blocked(j)}} THEN 'blocked'
            WHEN j.lease IS NULL THEN 'scheduled'
            ELSE 'leased'
        END AS state
    FROM windrow.job j
    WHERE j.id = n.id AND {{org_of(j)}} = {{org_id_of(n)}}
    UNION ALL
    SELECT d.queue_id, d.kind, d.payload, 'dead'
    FROM windrow.dead d
    WHERE d.id = n.id AND {{org_of(d)}} = {{org_id_of(n)}}
    UNION ALL
    SELECT
        d.queue_id, d.kind, d.payload,
        CASE WHEN d.reason IS NOT NULL THEN 'dead' WHEN d.run_at <= now() THEN 'ready' WHEN {{is_blocked(d)}} THEN 'blocked' ELSE 'scheduled' END
    FROM windrow.departing d
    WHERE d.id = n.id AND {{org_of(d)}} = {{org_id_of(n)}}
    UNION ALL
    SELECT f.queue_id, f.kind, f.payload, f.state
    FROM windrow.finished f
    WHERE f.id = n.id AND {{org_of(f)}} = {{org_id_of(n)}}
        AND f.finished_at >= least(to_timestamp(%(oldest_ms)s / 1000.0), now()) - interval '2 hours'
    UNION ALL
    SELECT c.queue_id, c.kind, c.payload, c.state
    FROM cold c
    WHERE c.id = n.id AND {{org_of(c)}} = {{org_id_of(n)}}
    LIMIT 1
) found
-- OFFSET 0 makes Postgres find the queue by its number, never by a scan of all queues.
CROSS JOIN LATERAL (SELECT q.queue FROM windrow.queue q WHERE q.queue_id = found.queue_id OFFSET 0) q
