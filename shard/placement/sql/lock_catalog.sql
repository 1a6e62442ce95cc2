-- Locks the row that has the catalog's epoch. Every change of a placement updates this row, so no placement changes
-- until this transaction ends.
SELECT FROM windrow.catalog c FOR UPDATE
