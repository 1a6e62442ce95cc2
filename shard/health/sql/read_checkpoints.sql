-- The numbers of timed checkpoints and of requested checkpoints, and how much WAL was written. Most requested
-- checkpoints come because much WAL was written.
SELECT c.num_timed, c.num_requested, w.wal_bytes::bigint FROM pg_stat_checkpointer c, pg_stat_wal w
