-- LOCKS ACCESS EXCLUSIVE: job, queue
-- READS: queue
-- Priorities that age (docs/decisions/0063-jobs-that-waited-long-go-first.md): for each step between a job's priority and 1
-- it waits for so long at most, and is then moved to priority 1. NULL: never.
ALTER TABLE windrow.queue
    ADD COLUMN ageing_seconds integer CHECK (ageing_seconds BETWEEN 1 AND 604800);

-- Sweeps find out from this index, which is small or empty, whether any of their queues has it.
CREATE INDEX queue_ageing ON windrow.queue (queue_id) WHERE ageing_seconds IS NOT NULL;

-- A moved job is visible from then on, because claims do not look below the floor, and run_at still says since when it is
-- due. NOT VALID: all rows that are there satisfy the condition that is dropped, which is narrower.
ALTER TABLE windrow.job
    DROP CONSTRAINT unleased_is_visible_when_due,
    ADD CONSTRAINT unleased_is_not_visible_before_it_is_due CHECK (lease IS NOT NULL OR visible_at >= run_at) NOT VALID;
