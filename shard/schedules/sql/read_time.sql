-- Returns the time of the transaction, by the clock by which schedules fire.
SELECT now() AS now
