-- Makes the names of one org's queues known. ON CONFLICT does nothing for those that are: find_queue_ids reads the ids
-- afterwards, in a statement of its own, because this one cannot see what a rival has just made.
WITH new_org AS (
    -- A conflict would use up a number.
    INSERT INTO windrow.org (org, slot)
    SELECT %(org)s, %(slot)s
    WHERE NOT EXISTS (SELECT FROM windrow.org known WHERE known.org = %(org)s)
    ON CONFLICT (org) DO NOTHING
)
INSERT INTO windrow.queue_name (queue)
SELECT n.queue FROM unnest(%(queues)s::text[]) AS n (queue)
WHERE NOT EXISTS (SELECT FROM windrow.queue_name known WHERE known.queue = n.queue)
ORDER BY n.queue
ON CONFLICT (queue) DO NOTHING
