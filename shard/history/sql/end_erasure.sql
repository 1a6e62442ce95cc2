-- Closes the books of an org that is being erased, if the counts of the org's expired jobs are all that the shard still
-- has of the org. Returns no row if the shard has more.
WITH closed AS MATERIALIZED (
    SELECT
    WHERE (SELECT coalesce(sum(t.accepted), 0) FROM windrow.tally t WHERE t.org_id = %(org_id)s)
        = (SELECT coalesce(sum(e.jobs), 0) FROM windrow.expired e WHERE e.org_id = %(org_id)s)
), tallies AS (
    DELETE FROM windrow.tally t WHERE t.org_id = %(org_id)s AND EXISTS (SELECT FROM closed)
), expiries AS (
    DELETE FROM windrow.expired e WHERE e.org_id = %(org_id)s AND EXISTS (SELECT FROM closed)
), queues AS (
    DELETE FROM windrow.queue q WHERE q.org = chr(127) || %(org_id)s::integer::text AND EXISTS (SELECT FROM closed)
)
UPDATE windrow.erasure e SET ended_at = now(), org_id = NULL
WHERE e.org_id = %(org_id)s AND EXISTS (SELECT FROM closed)
RETURNING e.id::text
