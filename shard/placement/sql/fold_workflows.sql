-- Folds these workflows: processes the arrivals that were appended for them, and releases or cancels jobs. Returns the
-- queues in which jobs were released.
SELECT windrow.fold_workflows(%(org_ids)s::integer[], %(ids)s::uuid[])
