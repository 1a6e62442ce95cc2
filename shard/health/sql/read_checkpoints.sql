-- Returns how many timed checkpoints and how many requested checkpoints there were, and how much WAL was written. Most
-- of the requested checkpoints are requested because much WAL was written.
SELECT c.num_timed, c.num_requested, w.wal_bytes::bigint FROM pg_stat_checkpointer c, pg_stat_wal w
