-- Records what the shard's clock shows, where that is later than what is recorded. Answers both. Of many routers one writes,
-- and once a second at most; nobody waits for another.
WITH recorded AS (
    UPDATE windrow.clock c SET latest = now()
    WHERE c.ctid = ANY (ARRAY(
        SELECT old.ctid FROM windrow.clock old WHERE old.latest < now() - interval '1 second' FOR UPDATE SKIP LOCKED
    ))
)
SELECT now(), greatest(c.latest, timestamptz 'epoch') FROM windrow.clock c
