-- Tells the other routers which queues may have new work. In a transaction of its own, after the one that made the work:
-- inside that one, NOTIFY would make every commit of the database wait for every other.
SELECT pg_notify('windrow_work', %(message)s)
