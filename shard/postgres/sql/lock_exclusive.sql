-- Waits for this advisory lock, and holds it until the transaction ends.
SELECT pg_advisory_xact_lock(%(lock)s)
