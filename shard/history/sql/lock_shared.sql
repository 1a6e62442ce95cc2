-- Takes the advisory lock `lock` in shared mode until the transaction ends. Waits while another session holds this lock
-- exclusively.
SELECT pg_advisory_xact_lock_shared(%(lock)s)
