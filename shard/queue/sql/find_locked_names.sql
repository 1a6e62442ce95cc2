-- Returns the places of the queues that cannot be made now, because another session locks the row of their org or of
-- their name. Waits for no lock.
WITH named AS MATERIALIZED (
    SELECT n.place, n.org, n.queue
    FROM unnest(%(orgs)s::text[], %(queues)s::text[]) WITH ORDINALITY AS n (org, queue, place)
), free_org AS MATERIALIZED (
    SELECT n.place FROM named n JOIN windrow.org o ON o.org = n.org FOR SHARE OF o SKIP LOCKED
), free_name AS MATERIALIZED (
    SELECT n.place FROM named n JOIN windrow.queue_name q ON q.queue = n.queue FOR KEY SHARE OF q SKIP LOCKED
)
SELECT n.place
FROM named n
WHERE EXISTS (SELECT FROM windrow.org o WHERE o.org = n.org) AND n.place NOT IN (SELECT o.place FROM free_org o)
    OR EXISTS (SELECT FROM windrow.queue_name q WHERE q.queue = n.queue)
        AND n.place NOT IN (SELECT f.place FROM free_name f)
