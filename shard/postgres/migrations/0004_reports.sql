-- LOCKS ACCESS EXCLUSIVE: cold, dead, departing, finished, job
-- What consumers report about a job while they hold its lease (Extend). Both stay with the job when the lease ends.
-- `progress` is for people: an object with done, total and note, each only if it is not empty. `checkpoint` is for the
-- next attempt, and opaque. NULL: nothing was reported.
-- The hot table comes last: a long read of the others then holds up no enqueue while this waits for its locks.
ALTER TABLE windrow.cold ADD COLUMN progress jsonb, ADD COLUMN checkpoint bytea;
ALTER TABLE windrow.finished ADD COLUMN progress jsonb, ADD COLUMN checkpoint bytea;
ALTER TABLE windrow.departing ADD COLUMN progress jsonb, ADD COLUMN checkpoint bytea;
ALTER TABLE windrow.dead ADD COLUMN progress jsonb, ADD COLUMN checkpoint bytea;
ALTER TABLE windrow.job ADD COLUMN progress jsonb, ADD COLUMN checkpoint bytea;
