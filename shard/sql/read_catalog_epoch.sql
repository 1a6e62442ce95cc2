-- The number of the catalog's latest change.
SELECT c.epoch FROM windrow.catalog c
