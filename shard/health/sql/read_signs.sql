-- Returns the signs that a shard needs an operator. The first three signs are times in seconds, and 0 if nothing is
-- wrong. The first sign is for how long the oldest snapshot has been held (without pg_read_all_stats, only sessions of
-- this role are seen). The second sign is how late the most overdue schedule is. The third sign is how late the
-- archiver is: the time since the oldest overdue day of finished jobs should have turned cold, or should have been
-- dropped (find_days.sql). The last two signs are the age of the oldest transaction ids, and the share of the server's
-- connections that is used.
SELECT
    coalesce(extract(epoch FROM clock_timestamp() - least(
        (
            SELECT min(a.xact_start)
            FROM pg_stat_activity a
            WHERE {{holds_snapshot(a)}}
        ),
        (SELECT min(p.prepared) FROM pg_prepared_xacts p WHERE p.database = current_database())
    )), 0)::float8 AS snapshot_s,
    coalesce((
        SELECT extract(epoch FROM now() - s.wake_at)
        FROM windrow.schedule s
        WHERE s.wake_at <= now()
            AND {{is_fired_here(s)}}
        ORDER BY s.wake_at
        LIMIT 1
    ), 0)::float8 AS schedule_late_s,
    coalesce((
        SELECT extract(epoch FROM now() - min(d.due_at))
        FROM (
            SELECT
                (
                    to_date(split_part(c.relname, '_', 3), 'YYYYMMDD') + 1
                    + CASE WHEN c.relname LIKE 'cold%%' THEN split_part(c.relname, '_', 2)::integer ELSE 0 END
                )::timestamp AT TIME ZONE 'UTC' + interval '3 hours' AS due_at
            FROM pg_class c
            WHERE c.relnamespace = 'windrow'::regnamespace AND c.relname ~ '^(finished|cold)_\d+_\d{8}$' AND c.relkind = 'r'
            OFFSET 0
        ) d
        WHERE d.due_at <= now()
    ), 0)::float8 AS archive_late_s,
    (SELECT max(greatest(age(d.datfrozenxid), mxid_age(d.datminmxid))) FROM pg_database d) AS transaction_age,
    (SELECT sum(d.numbackends) FROM pg_stat_database d)::float8 / {{connections_max}} AS connections_used
