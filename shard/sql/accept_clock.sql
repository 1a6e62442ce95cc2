-- What the shard's clock shows is right, and what was recorded before is not: recording begins anew. Answers what the clock
-- shows, and what was recorded, in microseconds since 1970.
WITH clock AS MATERIALIZED (
    SELECT (extract(epoch FROM now()) * 1000000)::bigint AS shown_us, c.last_value AS latest_us FROM windrow.clock c
)
SELECT clock.shown_us, clock.latest_us, setval('windrow.clock', clock.shown_us) FROM clock
