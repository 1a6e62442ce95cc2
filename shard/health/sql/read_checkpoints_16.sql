-- Returns how many timed checkpoints and how many requested checkpoints there were, and how much WAL was written. This
-- statement is for PostgreSQL 16 and earlier.
SELECT b.checkpoints_timed, b.checkpoints_req, w.wal_bytes::bigint FROM pg_stat_bgwriter b, pg_stat_wal w
