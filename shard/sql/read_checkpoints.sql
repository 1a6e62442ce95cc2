-- Checkpoints that came by time, and those that were asked for, most of them by WAL that filled up; and how much WAL there was.
SELECT c.num_timed, c.num_requested, w.wal_bytes::bigint FROM pg_stat_checkpointer c, pg_stat_wal w
