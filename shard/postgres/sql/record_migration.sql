-- Records that a migration was run, and notifies the running routers, so that they check whether they can still work
-- with the schema: the first message is for the routers that listen to the shard (shard/queue/doorbell.py), the second
-- for the routers that listen to the catalog.
WITH recorded AS (
    INSERT INTO windrow.migration (number, name, checksum, breaking)
    VALUES (%(number)s, %(name)s, %(checksum)s, %(breaking)s)
    RETURNING number
)
SELECT pg_notify('windrow_work', 'migration *'), pg_notify('windrow_catalog', '') FROM recorded
