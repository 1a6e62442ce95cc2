-- Returns the size of each table of the schema, with its partitions, without indexes.
SELECT coalesce(pg_partition_root(c.oid), c.oid)::regclass::text AS "table", sum(pg_table_size(c.oid))::bigint AS bytes
FROM pg_class c
WHERE c.relnamespace = to_regnamespace('windrow') AND c.relkind IN ('r', 'p')
GROUP BY 1
