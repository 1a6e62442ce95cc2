-- Releases the advisory locks of this session. Without this statement, Postgres would release them only some time after
-- the session has ended.
SELECT pg_advisory_unlock_all()
