-- Writes a message to the WAL, so that the commit of this statement waits for the synchronous standby. After that, the
-- standby also has everything that was committed before (invariant I1).
SELECT pg_logical_emit_message(true, 'windrow', '')
