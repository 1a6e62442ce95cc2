-- The latest time that this shard's clock has shown, as routers record it every few seconds (shard/clock.py). A clock that
-- shows an earlier time was set back.
CREATE TABLE windrow.clock (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    latest timestamptz NOT NULL
);
INSERT INTO windrow.clock (latest) VALUES ('-infinity');
