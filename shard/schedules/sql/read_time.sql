-- Returns the time at which the transaction began, by the shard's clock. Schedules fire by this clock.
SELECT now() AS now
