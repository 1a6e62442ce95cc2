-- Records the time of the shard's clock if it is more than a second later than the recorded time. Returns the time of
-- the clock, and the time that was recorded before, in microseconds since 1970.
WITH clock AS MATERIALIZED (
    SELECT (extract(epoch FROM now()) * 1000000)::bigint AS shown_us, c.last_value AS latest_us FROM windrow.clock c
)
SELECT
    clock.shown_us, clock.latest_us,
    CASE WHEN clock.latest_us < clock.shown_us - 1000000 THEN setval('windrow.clock', clock.shown_us) END
FROM clock
