-- LOCKS ACCESS EXCLUSIVE: schedule_run
-- A run may be skipped because the shard lost history and may have stored it before
-- (docs/decisions/0066-recovering-one-shard.md).
ALTER TABLE windrow.schedule_run
    DROP CONSTRAINT schedule_run_skipped_for_check,
    -- NOT VALID: the rows satisfied the narrower one, so there is nothing to read.
    ADD CONSTRAINT skipped_for_a_known_reason CHECK (skipped_for IN ('overlap', 'catch_up', 'pause', 'recovered')) NOT VALID;
