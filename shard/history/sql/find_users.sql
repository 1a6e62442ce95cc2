-- Returns the other sessions that hold a lock on one of these tables. A session without a name, such as one of
-- autovacuum, gets its backend type as its name.
SELECT DISTINCT a.pid, coalesce(nullif(a.application_name, ''), a.backend_type)
FROM pg_locks l
JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'relation' AND l.granted AND l.pid <> pg_backend_pid()
    AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    AND l.relation = ANY (%(tables)s::regclass[])
ORDER BY 1
