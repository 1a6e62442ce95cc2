-- Puts all queues of these orgs into the slots of their orgs. Run this statement after adopt_orgs.sql, which makes
-- inserts of these orgs' queues wait.
UPDATE windrow.queue q SET slot = o.slot
FROM unnest(%(orgs)s::text[]) AS n (org)
JOIN windrow.org o ON o.org = n.org
WHERE q.org = o.org AND q.slot <> o.slot
