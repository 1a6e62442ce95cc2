-- Returns the oid of this database and the start time of its server. Together they identify the database, even if it is
-- reached by another address.
SELECT (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())::bigint, pg_postmaster_start_time()
