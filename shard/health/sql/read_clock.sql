-- Returns how many seconds the server's clock is behind the latest time that it has shown, and the time that it shows
-- now, in seconds since 1970. The doctor also examines databases without a schema. For such a database the first value
-- is 0.
SELECT
    greatest(coalesce(max(s.last_value), 0) / 1000000.0 - extract(epoch FROM now()), 0)::float8,
    extract(epoch FROM now())::float8
FROM pg_sequences s
WHERE s.schemaname = 'windrow' AND s.sequencename = 'clock'
