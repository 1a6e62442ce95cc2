-- Returns the version of the limits, the version of the latest deletion, and the limits that have changed since the
-- version `since`. If a limit was deleted after that version, returns all limits. If there are no limits to return,
-- returns one row without a limit.
SELECT c.limits_changed, c.limits_cleared, l.org, l.queue, l.measure, l.amount, l.interval_us, l.changed
FROM windrow.catalog c
LEFT JOIN windrow.usage_limit l ON l.changed > %(since)s OR c.limits_cleared > %(since)s
