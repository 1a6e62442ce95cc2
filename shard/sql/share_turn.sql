-- Waits until nobody holds this advisory lock alone, and holds it with others until the transaction ends.
SELECT pg_advisory_xact_lock_shared(%(lock)s)
