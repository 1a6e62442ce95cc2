-- Records what the shard's clock shows, where that is later than what is recorded, once a second at most. Answers what it
-- shows, and what was recorded, in microseconds since 1970.
WITH clock AS MATERIALIZED (
    SELECT (extract(epoch FROM now()) * 1000000)::bigint AS shown_us, c.last_value AS latest_us FROM windrow.clock c
)
SELECT
    clock.shown_us, clock.latest_us,
    CASE WHEN clock.latest_us < clock.shown_us - 1000000 THEN setval('windrow.clock', clock.shown_us) END
FROM clock
