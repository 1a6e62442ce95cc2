-- Keeps slots where they are until this transaction ends, because every change of a placement updates the epoch in this
-- row.
SELECT FROM windrow.catalog c FOR UPDATE
