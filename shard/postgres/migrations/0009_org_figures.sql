-- How many jobs each org has in each state, as the jobs were counted last (shard/admin/org_figures.py). An org without
-- such jobs has no row. UNLOGGED: counting again costs less than writing all rows to the WAL. After a crash or a
-- failover the tables are empty, and the next reader counts.
CREATE UNLOGGED TABLE windrow.org_figures (
    -- No name: the erasure of an org must not leave it here.
    org_id bigint PRIMARY KEY,
    scheduled bigint NOT NULL,
    ready bigint NOT NULL,
    leased bigint NOT NULL,
    dead bigint NOT NULL,
    -- Since when its oldest ready job is ready, in microseconds since 1970: every read computes an age from it.
    oldest_ready_us bigint
);

-- When the jobs were counted.
CREATE UNLOGGED TABLE windrow.org_figures_counted (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    at timestamptz NOT NULL
);
