-- Takes this advisory lock, unless somebody else has it; it is held until the session ends.
SELECT pg_try_advisory_lock(%(lock)s::bigint)
