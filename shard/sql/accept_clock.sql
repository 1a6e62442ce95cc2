-- What the shard's clock shows is right, and what was recorded before is not: it begins anew. Answers what was recorded.
UPDATE windrow.clock c SET latest = now()
FROM (SELECT greatest(old.latest, timestamptz 'epoch') AS latest FROM windrow.clock old) before
RETURNING now(), before.latest
