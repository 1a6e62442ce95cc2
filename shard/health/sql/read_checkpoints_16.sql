-- The numbers of timed checkpoints and of requested checkpoints, and how much WAL was written. For PostgreSQL 16 and
-- earlier.
SELECT b.checkpoints_timed, b.checkpoints_req, w.wal_bytes::bigint FROM pg_stat_bgwriter b, pg_stat_wal w
