-- Returns the server's version, such as 18.6, the number of the schema's newest migration, and whether the server is a
-- standby.
SELECT
    split_part(current_setting('server_version'), ' ', 1), (SELECT max(m.number) FROM windrow.migration m),
    pg_is_in_recovery()
