-- The server's version, such as 18.6, and the number of the schema's newest migration.
SELECT split_part(current_setting('server_version'), ' ', 1), (SELECT max(m.number) FROM windrow.migration m)
