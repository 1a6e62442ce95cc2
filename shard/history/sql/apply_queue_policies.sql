-- Copies the retention of these orgs into their queues.
UPDATE windrow.queue q SET org_retention = o.retention
FROM windrow.org o
WHERE o.org = ANY (%(orgs)s::text[]) AND q.org = o.org AND q.org_retention IS DISTINCT FROM o.retention
