-- Notifies the other routers of queues that may have new jobs, and of leases that ended. This statement runs in its own
-- transaction, after the enqueue or the cancel. NOTIFY in the transaction of an enqueue or a cancel would make all
-- commits of the database wait for each other.
SELECT pg_notify('windrow_work', m.message) FROM unnest(%(messages)s::text[]) AS m (message)
