-- Checkpoints that came by time, requested checkpoints, and how much WAL was written; up to PostgreSQL 16.
SELECT b.checkpoints_timed, b.checkpoints_req, w.wal_bytes::bigint FROM pg_stat_bgwriter b, pg_stat_wal w
