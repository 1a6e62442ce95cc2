-- Returns the time of the shard's clock, in microseconds since 1970.
SELECT (extract(epoch FROM now()) * 1000000)::bigint
