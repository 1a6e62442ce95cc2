-- Limits of how many jobs start in an interval (docs/decisions/0049-starts-are-held-back.md). Their buckets are in
-- windrow.token_bucket, which takes any measure.
ALTER TABLE windrow.enqueue_limit
    DROP CONSTRAINT enqueue_limit_measure_check,
    ADD CONSTRAINT enqueue_limit_measure_check CHECK (measure IN ('jobs', 'bytes', 'starts'));
