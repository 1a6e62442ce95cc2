-- The latest time that this shard's clock has shown, in microseconds since 1970, as routers record it every few seconds
-- (shard/clock.py). A clock that shows an earlier time was set back. A sequence, because it is written in place: every ack
-- reads it, and a row would leave its old versions for as long as somebody holds a snapshot.
CREATE SEQUENCE windrow.clock;
