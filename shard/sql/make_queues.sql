-- Brings one org's queues into being, with the default configuration; a deleted one is listed again.
INSERT INTO windrow.queue AS q (name_id, org_id, org, queue, slot)
SELECT n.name_id, o.org_id, o.org, n.queue, o.slot
FROM windrow.org o
JOIN windrow.queue_name n ON n.queue = ANY (%(queues)s::text[])
WHERE o.org = %(org)s
ORDER BY n.queue
ON CONFLICT (org, queue) DO UPDATE SET listed = true WHERE NOT q.listed
