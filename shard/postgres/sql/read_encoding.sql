-- Returns the encoding of this database.
SELECT current_setting('server_encoding')
