-- Stores buckets that came with their orgs from another shard. A bucket does not fill while it moves.
INSERT INTO windrow.token_bucket AS b (org, queue, measure, tokens, filled_at, granted, amount, interval_us, version)
SELECT n.org, n.queue, n.measure, n.tokens, now(), 0, n.amount, n.interval_us, n.version
FROM unnest(
    %(orgs)s::text[], %(queues)s::text[], %(measures)s::text[], %(tokens)s::double precision[], %(amounts)s::bigint[],
    %(intervals_us)s::bigint[], %(versions)s::bigint[]
) AS n (org, queue, measure, tokens, amount, interval_us, version)
ON CONFLICT (org, queue, measure) DO UPDATE SET
    tokens = excluded.tokens, filled_at = excluded.filled_at, granted = 0, amount = excluded.amount,
    interval_us = excluded.interval_us, version = excluded.version
