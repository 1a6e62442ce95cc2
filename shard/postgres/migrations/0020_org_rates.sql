-- LOCKS ACCESS EXCLUSIVE: org_figures, org_figures_counted
-- READS: org_figures, org_figures_counted
-- How fast each org's jobs come and go, between the last two counts (docs/decisions/0062-rates-between-two-counts.md).
-- Counts of before know nothing of the accepted jobs: the first count after this migration gives no rates.
TRUNCATE windrow.org_figures, windrow.org_figures_counted;

ALTER TABLE windrow.org_figures
    -- Jobs that the shard ever stored for the org, by the tally.
    ADD COLUMN accepted bigint NOT NULL DEFAULT 0,
    -- Of the time between the last two counts: jobs that were stored, and jobs that ended (succeeded or cancelled).
    ADD COLUMN enqueued bigint NOT NULL DEFAULT 0,
    ADD COLUMN ended bigint NOT NULL DEFAULT 0;

ALTER TABLE windrow.org_figures_counted
    -- The count before the last one. NULL: there was none.
    ADD COLUMN before timestamptz,
    -- The last count that has counted accepted jobs too. A router of an older release does not.
    ADD COLUMN accepted_at timestamptz;
