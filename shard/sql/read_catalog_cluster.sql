-- Whose catalog this is; no row before it is founded.
SELECT c.cluster FROM windrow.catalog c
