-- LOCKS ACCESS EXCLUSIVE: catalog
-- Limits of how much orgs may enqueue (docs/decisions/0045-tokens-are-drawn-in-blocks.md). The catalog has the limits, and
-- each shard has the buckets of its orgs.

-- ── The catalog ──────────────────────────────────────────────────────────────────────────────────────────────────────

CREATE TABLE windrow.usage_limit (
    -- Empty: every org that has no limit of its own with the same queue and measure.
    org text COLLATE "C" NOT NULL,
    -- Empty: all queues of the org together.
    queue text COLLATE "C" NOT NULL,
    measure text COLLATE "C" NOT NULL CHECK (measure IN ('jobs', 'bytes')),
    amount bigint NOT NULL CHECK (amount BETWEEN 1 AND 1000000000000),
    interval_us bigint NOT NULL CHECK (interval_us BETWEEN 1000000 AND 86400000000),
    -- The value of catalog.limits_changed after the latest change of this limit.
    changed bigint NOT NULL,
    PRIMARY KEY (org, queue, measure)
);
CREATE INDEX usage_limit_changed ON windrow.usage_limit (changed);

-- Versions of the limits. They increase with each change, also after the catalog was restored from a backup. Routers read
-- the first with every look at the catalog. After a limit was deleted, they read all limits again.
ALTER TABLE windrow.catalog
    ADD COLUMN limits_changed bigint NOT NULL DEFAULT 0,
    ADD COLUMN limits_cleared bigint NOT NULL DEFAULT 0;

-- ── Each shard ───────────────────────────────────────────────────────────────────────────────────────────────────────

-- How much the orgs of this shard may still enqueue. A bucket without a row is full. UNLOGGED, because a draw should cost
-- no write to the WAL: after a crash or a failover all buckets are full. Each router draws a block of tokens from a row
-- at a time, so a row changes some tens of times a second at most.
CREATE UNLOGGED TABLE windrow.token_bucket (
    -- Names, because an org may be refused before it has an id here.
    org text COLLATE "C" NOT NULL,
    queue text COLLATE "C" NOT NULL,
    measure text COLLATE "C" NOT NULL,
    -- At `filled_at`, after the latest draw.
    tokens double precision NOT NULL,
    filled_at timestamptz NOT NULL,
    -- How many tokens the latest draw took: the answer of its statement.
    granted bigint NOT NULL,
    -- The limit by which the bucket fills, and its version.
    amount bigint NOT NULL,
    interval_us bigint NOT NULL,
    version bigint NOT NULL,
    PRIMARY KEY (org, queue, measure)
) WITH (
    -- Every draw leaves a dead row: room for them on the page keeps the index as it is.
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0
);

-- How many tokens a bucket has at a time. A clock that was set back neither fills a bucket nor keeps it from filling
-- later.
CREATE FUNCTION windrow.tokens_at(bucket windrow.token_bucket, moment timestamptz) RETURNS double precision
LANGUAGE sql STABLE AS $$
    SELECT least(
        bucket.amount,
        bucket.tokens + bucket.amount * 1000000.0::double precision
            * greatest(0, extract(epoch FROM moment - bucket.filled_at)::double precision) / bucket.interval_us
    )
$$;

-- Draws tokens from one bucket: `wanted`, or as many as there are; none if there are fewer than `needed`. Negative numbers
-- give tokens back. A limit of a newer version than the bucket's is taken over, and the tokens are scaled: a bucket that
-- is half full stays half full. Tokens that were drawn under another version cannot be given back.
CREATE FUNCTION windrow.draw_tokens(
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
                    WHEN wanted < 0 AND by_version <> b.version OR s.tokens < needed THEN 0
                    ELSE least(wanted, floor(s.tokens)::bigint)
                END AS granted
            ) g
        )
    RETURNING b.granted, b.tokens, b.version
$$;
