-- Writes something, so that its commit waits for the synchronous standby: that then has all that was committed before, too (I1).
SELECT pg_logical_emit_message(true, 'windrow', '')
