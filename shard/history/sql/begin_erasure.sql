-- Begins to erase an org: its rows get a name that no org can have, and a slot that does not exist. A process that
-- still uses the ids of these rows is refused, like every process that uses stale ids. The next job for the old name
-- creates a new org. Run lock_slots.sql before this statement. Returns no row if there is no such org, or if it is
-- under legal hold. A pinned org without a queue does not count as an org.
WITH gone AS (
    UPDATE windrow.org o
    SET org = chr(127) || o.org_id, slot = -1, retention = NULL, held = false
    WHERE o.org = %(org)s AND NOT o.held
        AND (o.slot < %(slots)s OR EXISTS (SELECT FROM windrow.queue q WHERE q.org_id = o.org_id))
    RETURNING o.org_id, o.org
), buckets AS (
    DELETE FROM windrow.token_bucket b
    WHERE b.org = %(org)s AND NOT EXISTS (SELECT FROM windrow.org o WHERE o.org = %(org)s AND o.held)
), queues AS (
    UPDATE windrow.queue q SET org = gone.org, slot = -1, listed = false FROM gone WHERE q.org = %(org)s
)
INSERT INTO windrow.erasure (id, org_id) SELECT %(id)s::uuid, gone.org_id FROM gone
RETURNING org_id
