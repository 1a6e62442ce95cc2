-- Notifies the other routers of queues that may have new jobs. This runs in its own transaction, after the enqueue:
-- NOTIFY inside the enqueue would make all commits of the database wait for each other.
SELECT pg_notify('windrow_work', %(message)s)
