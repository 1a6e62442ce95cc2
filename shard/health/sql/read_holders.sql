-- Returns everything that prevents Postgres from removing WAL or the dead rows of this database, the oldest first. A
-- time is NULL if it is unknown or if this role may not see it.
SELECT
    'process' AS kind, a.pid::text AS name, a.pid, a.usename::text AS role, coalesce(nullif(a.application_name, ''), a.backend_type)
        AS application, host(a.client_addr) AS client, a.state, a.wait_event_type || ' ' || a.wait_event AS waits_for,
    extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS held_s,
    extract(epoch FROM clock_timestamp() - a.query_start)::float8 AS query_s,
    greatest(age(a.backend_xmin), age(a.backend_xid)) AS transactions, NULL::bigint AS wal_bytes, left(a.query, 200) AS query,
    coalesce(
        pg_has_role(a.usesysid, 'USAGE') OR pg_has_role('pg_signal_backend', 'USAGE') AND NOT r.rolsuper, false
    ) AS may_end
FROM pg_stat_activity a
LEFT JOIN pg_roles r ON r.oid = a.usesysid
WHERE {{holds_snapshot(a)}}
UNION ALL
SELECT
    'prepared transaction', p.gid, NULL, p.owner::text, NULL, NULL, NULL, NULL,
    extract(epoch FROM clock_timestamp() - p.prepared)::float8, NULL, age(p.transaction), NULL, NULL,
    p.owner = current_user OR r.rolsuper
FROM pg_prepared_xacts p
JOIN pg_roles r ON r.rolname = current_user
WHERE p.database = current_database()
UNION ALL
SELECT
    s.slot_type || ' slot', s.slot_name::text, s.active_pid, NULL, NULL, NULL,
    CASE WHEN s.active THEN 'in use' ELSE 'unused' END, NULL,
    -- PostgreSQL has inactive_since from version 17 on.
    extract(epoch FROM clock_timestamp() - (to_jsonb(s) ->> 'inactive_since')::timestamptz)::float8, NULL,
    greatest(age(s.xmin), age(s.catalog_xmin)),
    pg_wal_lsn_diff(
        CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END, s.restart_lsn
    )::bigint,
    NULL, r.rolsuper OR r.rolreplication
FROM pg_replication_slots s
JOIN pg_roles r ON r.rolname = current_user
UNION ALL
-- A standby that uses a slot is not listed as a standby, because the slot holds its snapshot.
SELECT
    'standby', coalesce(nullif(b.application_name, ''), b.pid::text), b.pid, b.usename::text, NULL, host(b.client_addr), b.state,
    NULL, NULL, NULL, age(b.backend_xmin), NULL, NULL, false
FROM pg_stat_replication b
WHERE b.backend_xmin IS NOT NULL
ORDER BY transactions DESC NULLS LAST, held_s DESC NULLS LAST, name
