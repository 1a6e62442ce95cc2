-- Creates queues with the default configuration. With `relisted`, a deleted queue is listed again. Concurrent inserts
-- may conflict in any of the unique indexes, and DO UPDATE handles only one index. So the insert has DO NOTHING, and a
-- separate update follows.
WITH made AS (
    INSERT INTO windrow.queue (name_id, org_id, org, queue, slot, org_retention)
    SELECT q.name_id, o.org_id, o.org, q.queue, o.slot, o.retention
    FROM unnest(%(orgs)s::text[], %(queues)s::text[]) AS n (org, queue)
    JOIN windrow.org o ON o.org = n.org
    JOIN windrow.queue_name q ON q.queue = n.queue
    ORDER BY o.org, q.queue
    -- While adopt_orgs.sql or apply_org_policies.sql changes an org, inserts of its queues wait, so that they copy the
    -- new values.
    FOR SHARE OF o
    ON CONFLICT DO NOTHING
)
UPDATE windrow.queue q SET listed = true
FROM unnest(%(orgs)s::text[], %(queues)s::text[]) AS n (org, queue)
WHERE q.org = n.org AND q.queue = n.queue AND NOT q.listed AND %(relisted)s
