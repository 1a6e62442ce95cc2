-- Accepts the shard's clock: replaces the recorded latest time by the present time. Returns the present time, and the
-- time that was recorded before, in microseconds since 1970.
WITH clock AS MATERIALIZED (
    SELECT (extract(epoch FROM now()) * 1000000)::bigint AS shown_us, c.last_value AS latest_us FROM windrow.clock c
)
SELECT clock.shown_us, clock.latest_us, setval('windrow.clock', clock.shown_us) FROM clock
