-- Brings queues into being, with the default configuration; a deleted one is listed again where somebody wants to use it. Any
-- unique index may be the one in which rivals meet, and DO UPDATE heeds but one of them: so DO NOTHING, and an update of its own.
WITH made AS (
    INSERT INTO windrow.queue (name_id, org_id, org, queue, slot, org_retention)
    SELECT q.name_id, o.org_id, o.org, q.queue, o.slot, o.retention
    FROM unnest(%(orgs)s::text[], %(queues)s::text[]) AS n (org, queue)
    JOIN windrow.org o ON o.org = n.org
    JOIN windrow.queue_name q ON q.queue = n.queue
    ORDER BY o.org, q.queue
    -- While an org is put into another slot, or told how long its jobs are kept, its new queues wait: they are to have that too.
    FOR SHARE OF o
    ON CONFLICT DO NOTHING
)
UPDATE windrow.queue q SET listed = true
FROM unnest(%(orgs)s::text[], %(queues)s::text[]) AS n (org, queue)
WHERE q.org = n.org AND q.queue = n.queue AND NOT q.listed AND %(relisted)s
