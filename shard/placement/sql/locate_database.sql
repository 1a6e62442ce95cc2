-- Which database of which server this is, whatever address was used to reach it.
SELECT (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())::bigint, pg_postmaster_start_time()
