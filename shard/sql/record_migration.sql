-- Writes down that a migration was run, and tells the routers that are up, so that they look whether they can still work with
-- the schema. Routers of an earlier release take the first message for a ring for every queue (doorbell.py), and the second
-- for a change of the catalog.
WITH recorded AS (
    INSERT INTO windrow.migration (number, name, checksum, breaking)
    VALUES (%(number)s, %(name)s, %(checksum)s, %(breaking)s)
    RETURNING number
)
SELECT pg_notify('windrow_work', 'migration *'), pg_notify('windrow_catalog', '') FROM recorded
