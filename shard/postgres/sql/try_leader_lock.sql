-- Takes this advisory lock unless another session holds it. Returns whether this session has the lock, which it then
-- holds until it ends.
SELECT pg_try_advisory_lock(%(lock)s::bigint)
