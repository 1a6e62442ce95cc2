-- Returns this database's encoding, and whether it has the schema or this role may create it.
SELECT
    current_setting('server_encoding'),
    to_regnamespace('windrow') IS NOT NULL OR has_database_privilege(current_database(), 'CREATE')
