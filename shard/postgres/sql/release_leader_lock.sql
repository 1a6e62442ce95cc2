-- Releases the advisory locks of this session. Postgres would do so a moment after the session has ended.
SELECT pg_advisory_unlock_all()
