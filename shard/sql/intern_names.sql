-- Makes the names of orgs and of queues known. ON CONFLICT does nothing for those that are: find_queue_ids reads the ids
-- afterwards, in a statement of its own, because this one cannot see what a rival has just made. Ordered, so that rivals
-- never wait for each other in a ring.
WITH new_org AS (
    -- A conflict would use up a number.
    INSERT INTO windrow.org (org, slot)
    SELECT n.org, n.slot FROM unnest(%(orgs)s::text[], %(slots)s::smallint[]) AS n (org, slot)
    WHERE NOT EXISTS (SELECT FROM windrow.org known WHERE known.org = n.org)
    ORDER BY n.org
    ON CONFLICT (org) DO NOTHING
)
INSERT INTO windrow.queue_name (queue)
SELECT n.queue FROM unnest(%(queues)s::text[]) AS n (queue)
WHERE NOT EXISTS (SELECT FROM windrow.queue_name known WHERE known.queue = n.queue)
ORDER BY n.queue
ON CONFLICT (queue) DO NOTHING
