-- Brings one org's queues into being, with the default configuration; a deleted one is listed again. Any unique index may
-- be the one in which rivals meet, and DO UPDATE heeds but one of them: so DO NOTHING, and an update of its own.
WITH made AS (
    INSERT INTO windrow.queue (name_id, org_id, org, queue, slot)
    SELECT n.name_id, o.org_id, o.org, n.queue, o.slot
    FROM windrow.org o
    JOIN windrow.queue_name n ON n.queue = ANY (%(queues)s::text[])
    WHERE o.org = %(org)s
    ORDER BY n.queue
    ON CONFLICT DO NOTHING
)
UPDATE windrow.queue q SET listed = true
WHERE q.org = %(org)s AND q.queue = ANY (%(queues)s::text[]) AND NOT q.listed
