-- Returns facts about the server and this database: version, size, connections, the age of the oldest transaction ids,
-- and what this role may see. Names are quoted for use in SQL.
SELECT
    split_part(current_setting('server_version'), ' ', 1) AS version, current_setting('server_version_num')::integer,
    quote_ident(d.datname), quote_ident(current_user), pg_database_size(d.oid),
    extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())::float8 AS up_s, pg_is_in_recovery(),
    pg_has_role('pg_read_all_stats', 'USAGE') AS sees_others,
    (SELECT sum(s.numbackends) FROM pg_stat_database s)::integer AS connections,
    {{connections_max}} AS connections_max,
    age(x.datfrozenxid), quote_ident(x.datname), mxid_age(m.datminmxid), quote_ident(m.datname),
    -- A role that owns the schema or something in it, and whose rights this role does not have.
    (
        SELECT quote_ident(pg_get_userbyid(w.owner)) FROM (
            SELECT n.nspowner AS owner FROM pg_namespace n WHERE n.nspname = 'windrow'
            UNION ALL
            SELECT c.relowner FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'windrow'
        ) w WHERE NOT pg_has_role(w.owner, 'USAGE') LIMIT 1
    ) AS other_owner
FROM pg_database d
-- Use the database with the oldest ids, which may be any database of the server.
CROSS JOIN (
    SELECT o.datname, o.datfrozenxid FROM pg_database o ORDER BY age(o.datfrozenxid) DESC, o.datname <> current_database() LIMIT 1
) x
CROSS JOIN (
    SELECT o.datname, o.datminmxid FROM pg_database o ORDER BY mxid_age(o.datminmxid) DESC, o.datname <> current_database() LIMIT 1
) m
WHERE d.datname = current_database()
