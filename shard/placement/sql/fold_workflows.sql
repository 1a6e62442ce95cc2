-- Folds these workflows: they take in the arrivals that were appended for them, and act on them. Returns the queues in
-- which jobs were released.
SELECT windrow.fold_workflows(%(org_ids)s::integer[], %(ids)s::uuid[])
