-- Returns who holds this advisory lock, and from which address. Postgres hides the address of other roles' sessions.
SELECT a.application_name, host(a.client_addr), a.pid
FROM pg_locks l
JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
    AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    AND l.classid::bigint = %(lock)s::bigint >> 32 AND l.objid::bigint = %(lock)s::bigint & 4294967295
