-- Returns the buckets of all orgs in these slots, with the tokens that the buckets have now.
SELECT
    (b.bucket).org, (b.bucket).queue, (b.bucket).measure, windrow.tokens_at(b.bucket, now()) AS tokens, (b.bucket).amount,
    (b.bucket).interval_us, (b.bucket).version
FROM unnest(%(slots)s::smallint[]) AS n (slot)
-- OFFSET 0 makes the planner use only the indexes by slot and by org.
CROSS JOIN LATERAL (SELECT o.org FROM windrow.org o WHERE o.slot = n.slot OFFSET 0) o
CROSS JOIN LATERAL (SELECT t AS bucket FROM windrow.token_bucket t WHERE t.org = o.org OFFSET 0) b
ORDER BY 1, 2, 3
