-- For jobs that an enqueue did not store: the id under which each is known, by its own id first, then by its dedup key.
SELECT n.id::text AS id, coalesce(
    (SELECT j.id FROM windrow.job j WHERE j.id = n.id),
    (SELECT d.id FROM windrow.dead d WHERE d.id = n.id),
    (
        SELECT f.id
        FROM windrow.finished f
        WHERE f.id = n.id AND f.finished_at >= least(to_timestamp(%(oldest_ms)s / 1000.0), now()) - interval '1 hour'
        LIMIT 1
    ),
    (SELECT d.job_id FROM windrow.dedup d WHERE d.queue_id = n.queue_id AND d.key = n.dedup_key AND d.until > now())
)::text AS known_as
FROM unnest(%(ids)s::uuid[], %(queue_ids)s::bigint[], %(dedup_keys)s::text[]) AS n (id, queue_id, dedup_key)
