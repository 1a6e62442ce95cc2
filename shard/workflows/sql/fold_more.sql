-- Folds a portion of the work that is left in a workflow. Returns the queues in which jobs were released, and whether
-- more work may be left.
SELECT f.released, f.is_left FROM windrow.fold_more(%(org_id)s::integer, %(id)s::uuid) f
