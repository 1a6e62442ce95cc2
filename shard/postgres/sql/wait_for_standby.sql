-- Writes a message to the WAL, so that its commit waits for the synchronous standby. The standby then also has
-- everything that was committed before (I1).
SELECT pg_logical_emit_message(true, 'windrow', '')
