-- Returns the tables of the schema `windrow`. Each partition has a row of its own. Partitioned tables have rows too,
-- because they may have no partitions.
SELECT
    quote_ident(c.relname) AS name,
    -- The partitioned table to which a partition belongs, or the table itself.
    coalesce((SELECT root.relname FROM pg_class root WHERE root.oid = pg_partition_root(c.oid)), c.relname)::text AS family,
    c.relkind = 'p' AS partitioned,
    -- After a crash, all counters are 0. Then use the number of rows that the last vacuum or analyze has recorded.
    CASE WHEN s.n_tup_ins + s.n_tup_del + s.vacuum_count + s.autovacuum_count + s.analyze_count + s.autoanalyze_count > 0
        THEN s.n_live_tup ELSE greatest(c.reltuples, 0)::bigint END AS rows,
    coalesce(s.n_dead_tup, 0) AS dead_rows,
    coalesce(pg_table_size(c.oid), 0) AS bytes, coalesce(pg_relation_size(c.oid), 0) AS heap_bytes,
    coalesce(pg_indexes_size(c.oid), 0) AS index_bytes,
    -- Only for the table `job`: the width of a row including its header and line pointer, from the statistics.
    CASE WHEN c.relname = 'job' THEN (
        SELECT sum(w.avg_width * (1 - w.null_frac)) + 28 FROM pg_stats w WHERE w.schemaname = 'windrow' AND w.tablename = 'job'
    ) END::float8 AS row_bytes,
    extract(epoch FROM clock_timestamp() - greatest(s.last_vacuum, s.last_autovacuum))::float8 AS vacuumed_s,
    extract(epoch FROM clock_timestamp() - greatest(s.last_analyze, s.last_autoanalyze))::float8 AS analyzed_s,
    coalesce(c.reloptions, '{}') AS options
FROM pg_class c
LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid
WHERE c.relnamespace = to_regnamespace('windrow') AND (c.relkind = 'r' OR c.relkind = 'p' AND NOT c.relispartition)
ORDER BY c.relname
