-- Lets a workflow take in a portion of what it has left. Returns the queues in which jobs were released, and whether more
-- may be left.
SELECT f.released, f.is_left FROM windrow.fold_more(%(org_id)s::integer, %(id)s::uuid) f
