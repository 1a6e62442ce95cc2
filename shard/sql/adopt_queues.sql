-- Puts all queues of these orgs into their orgs' slots; after adopt_orgs, which queues that are just being made wait for.
UPDATE windrow.queue q SET slot = o.slot
FROM unnest(%(orgs)s::text[]) AS n (org)
JOIN windrow.org o ON o.org = n.org
WHERE q.org = o.org AND q.slot <> o.slot
