-- Inserts the names of orgs and queues that do not exist yet. ON CONFLICT skips names that a concurrent statement
-- inserts. This statement cannot see those names, so find_queue_ids.sql reads the ids afterwards. The order of the
-- inserts prevents deadlocks between concurrent runs.
WITH new_org AS (
    -- Skip existing orgs first, because each conflict would use up a number of the sequence.
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
