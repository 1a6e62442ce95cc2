-- LOCKS ACCESS EXCLUSIVE: workflow
-- READS: workflow
-- A workflow that is retried is started once more, as a new one (docs/decisions/0065-a-retry-is-a-new-workflow.md).

-- The workflow that it retries.
ALTER TABLE windrow.workflow ADD COLUMN retry_of uuid;
-- Two retries of one workflow would do its work twice.
CREATE UNIQUE INDEX workflow_retry ON windrow.workflow (org_id, retry_of) WHERE retry_of IS NOT NULL;
