-- LOCKS ACCESS EXCLUSIVE: usage_limit
-- READS: usage_limit
-- Limits of how many jobs start in an interval (docs/decisions/0049-starts-are-held-back.md). Their buckets are in
-- windrow.token_bucket, which takes any measure.
ALTER TABLE windrow.usage_limit
    DROP CONSTRAINT usage_limit_measure_check,
    ADD CONSTRAINT usage_limit_measure_check CHECK (measure IN ('jobs', 'bytes', 'starts'));

-- Draws tokens from one bucket: `wanted`, or as many as there are; none if there are fewer than `needed`. Negative numbers
-- give tokens back. A limit of a newer version than the bucket's is taken over, and the tokens are scaled: a bucket that
-- is half full stays half full. Tokens that were drawn under an older version than the bucket's cannot be given back. A newer
-- one may be given with them: a router keeps its tokens only if nothing but the version has changed.
CREATE OR REPLACE FUNCTION windrow.draw_tokens(
    of_org text, of_queue text, of_measure text, needed bigint, wanted bigint, by_amount bigint, by_interval_us bigint,
    by_version bigint
) RETURNS TABLE (granted bigint, tokens double precision, version bigint)
LANGUAGE sql VOLATILE AS $$
    INSERT INTO windrow.token_bucket AS b (org, queue, measure, tokens, filled_at, granted, amount, interval_us, version)
    VALUES (
        of_org, of_queue, of_measure, by_amount - greatest(0, least(wanted, by_amount)), clock_timestamp(),
        least(wanted, by_amount), by_amount, by_interval_us, by_version
    )
    ON CONFLICT (org, queue, measure) DO UPDATE SET
        (tokens, filled_at, granted, amount, interval_us, version) = (
            SELECT s.tokens - g.granted, n.at, g.granted, l.amount, l.interval_us, greatest(b.version, by_version)
            -- The clock is read while the row is locked, so that of two draws the later one has the later time.
            FROM (SELECT clock_timestamp() AS at OFFSET 0) n
            CROSS JOIN LATERAL (
                SELECT
                    CASE WHEN by_version > b.version THEN by_amount ELSE b.amount END AS amount,
                    CASE WHEN by_version > b.version THEN by_interval_us ELSE b.interval_us END AS interval_us
            ) l
            CROSS JOIN LATERAL (SELECT windrow.tokens_at(b, n.at) * l.amount / b.amount AS tokens) s
            CROSS JOIN LATERAL (
                SELECT CASE
                    WHEN wanted < 0 AND by_version < b.version OR s.tokens < needed THEN 0
                    ELSE least(wanted, floor(s.tokens)::bigint)
                END AS granted
            ) g
        )
    RETURNING b.granted, b.tokens, b.version
$$;
