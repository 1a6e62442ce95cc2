-- Which cluster's catalog this is. No row: there is no catalog yet.
SELECT c.cluster FROM windrow.catalog c
