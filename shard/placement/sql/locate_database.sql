-- Returns the oid of this database and the start time of its server. Together they identify the database, also if it
-- was reached by another address.
SELECT (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())::bigint, pg_postmaster_start_time()
