-- LOCKS ACCESS EXCLUSIVE: org, policy, queue
-- READS: org, policy, queue
-- A retention may be any number of days up to ten years. The partitions of `finished` and `cold` for another retention
-- than the seven of 0002_history.sql are made when they are first needed (shard/postgres/partitions.py).
ALTER TABLE windrow.policy
    DROP CONSTRAINT policy_retention_check, ADD CONSTRAINT policy_retention_check CHECK (retention BETWEEN 0 AND 3650);
ALTER TABLE windrow.org
    DROP CONSTRAINT org_retention_check, ADD CONSTRAINT org_retention_check CHECK (retention BETWEEN 0 AND 3650);
-- The table that enqueues read comes last: they wait while it is locked.
ALTER TABLE windrow.queue
    DROP CONSTRAINT queue_retention_check, ADD CONSTRAINT queue_retention_check CHECK (retention BETWEEN 0 AND 3650);
