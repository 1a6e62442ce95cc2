-- Nothing is placed elsewhere before this transaction ends: whatever does so counts the epoch.
SELECT FROM windrow.catalog c FOR UPDATE
