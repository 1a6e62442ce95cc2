-- Does a portion of the work that remains in the fold of a workflow. Returns the queues in which jobs were released,
-- and whether more work may remain.
SELECT f.released, f.is_left FROM windrow.fold_more(%(org_id)s::integer, %(id)s::uuid) f
