-- How this database encodes text.
SELECT current_setting('server_encoding')
