-- Takes this advisory lock unless another session holds it. Returns whether it was taken. It is held until the session
-- ends.
SELECT pg_try_advisory_lock(%(lock)s::bigint)
