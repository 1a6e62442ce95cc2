-- LOCKS ACCESS EXCLUSIVE: cold, dead, departing, finished, job
-- READS: departing, job
-- The dedup key of a job that counts while the job is live: docs/decisions/0031-keys-that-count-while-live.md. It stays
-- with the job as what its producer gave, but only a row of windrow.job holds the key.
-- `max_runtime_us` is how long one attempt may take, in microseconds; NULL: as long as its consumer extends the lease.
-- The hot table comes last: see 0004_reports.sql.
ALTER TABLE windrow.cold ADD COLUMN live_key text COLLATE "C", ADD COLUMN max_runtime_us bigint;
ALTER TABLE windrow.finished ADD COLUMN live_key text COLLATE "C", ADD COLUMN max_runtime_us bigint;
ALTER TABLE windrow.departing ADD COLUMN live_key text COLLATE "C", ADD COLUMN max_runtime_us bigint;
ALTER TABLE windrow.dead ADD COLUMN live_key text COLLATE "C", ADD COLUMN max_runtime_us bigint;
ALTER TABLE windrow.job ADD COLUMN live_key text COLLATE "C", ADD COLUMN max_runtime_us bigint;

-- An enqueue asks a shard that the slot is leaving whether the key is on its way.
CREATE INDEX departing_live_key ON windrow.departing (queue_id, live_key) WHERE live_key IS NOT NULL;
-- One live job for each key. A job without such a key has no entry, in its insert and in its claims.
CREATE UNIQUE INDEX job_live_key ON windrow.job (queue_id, live_key) WHERE live_key IS NOT NULL;
