-- Copies the catalog's policies to the orgs of this shard; orgs without a policy get the default. Returns the orgs that
-- changed.
WITH told AS MATERIALIZED (
    SELECT o.org_id, t.retention, t.held
    FROM (
        SELECT n.org, n.retention, n.held
        FROM unnest(%(orgs)s::text[], %(retentions)s::smallint[], %(held)s::boolean[]) AS n (org, retention, held)
        UNION ALL
        SELECT b.org, NULL, false
        FROM windrow.org b
        WHERE (b.retention IS NOT NULL OR b.held) AND NOT b.org = ANY (%(orgs)s::text[])
    ) t
    JOIN windrow.org o ON o.org = t.org
    WHERE (o.retention, o.held) IS DISTINCT FROM (t.retention, t.held)
    -- Lock orgs in the order in which insert_queues.sql locks them, to prevent deadlocks.
    ORDER BY o.org
    FOR NO KEY UPDATE OF o
)
UPDATE windrow.org o SET retention = told.retention, held = told.held FROM told WHERE o.org_id = told.org_id
RETURNING o.org
