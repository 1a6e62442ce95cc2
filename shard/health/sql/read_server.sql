-- The server and this database: version, size, connections, the age of the oldest transaction ids, and what this role
-- may see. Names are quoted for use in SQL.
SELECT
    split_part(current_setting('server_version'), ' ', 1) AS version, current_setting('server_version_num')::integer,
    quote_ident(d.datname), quote_ident(current_user), pg_database_size(d.oid),
    extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())::float8 AS up_s, pg_is_in_recovery(),
    pg_has_role('pg_read_all_stats', 'USAGE') AS sees_others,
    (SELECT sum(s.numbackends) FROM pg_stat_database s)::integer AS connections,
    -- Connections that ordinary roles may use.
    current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer
        - coalesce(current_setting('reserved_connections', true)::integer, 0) AS connections_max,
    age(d.datfrozenxid), mxid_age(d.datminmxid)
FROM pg_database d
WHERE d.datname = current_database()
