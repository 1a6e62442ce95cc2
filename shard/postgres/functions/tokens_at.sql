-- How many tokens a bucket has at a time. A clock that was set back neither fills a bucket nor keeps it from filling
-- later.
CREATE OR REPLACE FUNCTION windrow.tokens_at(bucket windrow.token_bucket, moment timestamptz) RETURNS double precision
LANGUAGE sql STABLE AS $$
    SELECT least(
        bucket.amount,
        bucket.tokens + bucket.amount * 1000000.0::double precision
            * greatest(0, extract(epoch FROM moment - bucket.filled_at)::double precision) / bucket.interval_us
    )
$$;
