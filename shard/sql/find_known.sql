-- For jobs that an enqueue did not store, by their turn: the id under which each is known, by its own id first, then by its
-- dedup key; and whether that is a job of the same org. Ids are one space for the whole shard, and an org may not learn
-- another's.
SELECT n.turn, known.id::text AS known_as, known.queue_id & 4294967295 = n.queue_id & 4294967295 AS ours
FROM unnest(%(ids)s::uuid[], %(queue_ids)s::bigint[], %(dedup_keys)s::text[])
    WITH ORDINALITY AS n (id, queue_id, dedup_key, turn)
CROSS JOIN LATERAL (
    SELECT j.id, j.queue_id FROM windrow.job j WHERE j.id = n.id
    UNION ALL
    SELECT d.id, d.queue_id FROM windrow.dead d WHERE d.id = n.id
    UNION ALL
    SELECT f.id, f.queue_id
    FROM windrow.finished f
    WHERE f.id = n.id AND f.finished_at >= least(to_timestamp(%(oldest_ms)s / 1000.0), now()) - interval '1 hour'
    UNION ALL
    SELECT d.job_id, d.queue_id
    FROM windrow.dedup d
    WHERE d.queue_id = n.queue_id AND d.key = n.dedup_key AND d.until > now()
    LIMIT 1
) known
-- A commit that was interrupted while it waited for its standby is seen by all, and a failover may still lose it. What is
-- said because of it must wait as it did: so does a transaction that has written something.
WHERE (SELECT pg_logical_emit_message(true, 'windrow', '')) IS NOT NULL
