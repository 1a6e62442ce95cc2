-- The time of the transaction, by the clock that schedules go by.
SELECT now() AS now
