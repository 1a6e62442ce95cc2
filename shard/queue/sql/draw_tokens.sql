-- Draws tokens from buckets, each for one org, queue and measure. Returns for each draw, by its position, how many
-- tokens it got and how many tokens the bucket has after the draw. Rows are locked in the order of their keys, so that
-- two of these statements never deadlock. shard/postgres/functions/draw_tokens.sql makes a single draw.
SELECT n.position, d.granted, d.tokens, d.version
FROM (
    SELECT *
    FROM unnest(
        %(orgs)s::text[], %(queues)s::text[], %(measures)s::text[], %(needed)s::bigint[], %(wanted)s::bigint[],
        %(amounts)s::bigint[], %(intervals_us)s::bigint[], %(versions)s::bigint[]
    ) WITH ORDINALITY AS u (org, queue, measure, needed, wanted, amount, interval_us, version, position)
    ORDER BY u.org COLLATE "C", u.queue COLLATE "C", u.measure COLLATE "C"
    OFFSET 0
) n
CROSS JOIN LATERAL windrow.draw_tokens(
    n.org, n.queue, n.measure, n.needed, n.wanted, n.amount, n.interval_us, n.version
) d
