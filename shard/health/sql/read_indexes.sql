-- Returns the indexes of the table `job`, and every invalid index. Each row has the size of the index, and the width of
-- one entry, including the header and the line pointer.
SELECT
    quote_ident(i.relname), quote_ident(t.relname), coalesce(pg_relation_size(i.oid), 0) AS bytes, x.indisvalid,
    (
        SELECT sum(CASE WHEN a.attlen > 0 THEN (a.attlen + 7) / 8 * 8 ELSE 32 END) + 12
        FROM pg_attribute a
        WHERE a.attrelid = i.oid AND a.attnum > 0
    )::integer AS entry_bytes
FROM pg_index x
JOIN pg_class i ON i.oid = x.indexrelid AND i.relkind = 'i'
JOIN pg_class t ON t.oid = x.indrelid
WHERE t.relnamespace = to_regnamespace('windrow') AND (t.relname = 'job' OR NOT x.indisvalid)
ORDER BY i.relname
