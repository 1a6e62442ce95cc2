-- Keeps slots where they are until this transaction ends: every change of the placement updates the epoch in this row.
SELECT FROM windrow.catalog c FOR UPDATE
