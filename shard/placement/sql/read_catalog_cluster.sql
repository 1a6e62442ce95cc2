-- Returns the name of the cluster whose catalog this is, or no row if there is no catalog yet.
SELECT c.cluster FROM windrow.catalog c
