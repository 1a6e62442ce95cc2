-- Returns the queues that give slots to groups, each with the number of slots that a group has. Leaves out queues whose
-- slot moves: meanwhile neither shard gives group slots, so a group has at most k of them on both together. OFFSET 0
-- fences: finds queues and slots by their numbers, never by a scan of all of them.
CREATE OR REPLACE FUNCTION windrow.slots_of_groups(queues bigint[]) RETURNS TABLE (queue_id bigint, slots_max integer)
LANGUAGE sql STABLE AS $$
    SELECT n.queue_id, q.slots_max
    FROM (SELECT DISTINCT u.queue_id FROM unnest(queues) AS u (queue_id)) n
    CROSS JOIN LATERAL (
        SELECT coalesce(c.group_concurrency, 1)::integer AS slots_max, c.slot
        FROM windrow.queue c WHERE c.queue_id = n.queue_id OFFSET 0
    ) q
    WHERE EXISTS (
        SELECT FROM windrow.owned_slot o WHERE o.slot = q.slot AND o.state = 'owned' AND NOT o.arriving OFFSET 0
    )
$$;
