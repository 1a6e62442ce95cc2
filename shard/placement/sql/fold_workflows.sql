-- Lets workflows take in what was appended for them, and act on it. Returns the queues in which jobs were released.
SELECT windrow.fold_workflows(%(org_ids)s::integer[], %(ids)s::uuid[])
