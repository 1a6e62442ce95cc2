-- Returns how many jobs of a queue's org, and of the queue, are leased and count towards a limit. Stops counting at
-- these limits. NULL: there is no such limit. Takes no locks.
SELECT
    CASE WHEN m.of_org IS NOT NULL THEN windrow.count_in_flight(%(queue_id)s, true, m.of_org) END,
    CASE WHEN m.of_queue IS NOT NULL THEN windrow.count_in_flight(%(queue_id)s, false, m.of_queue) END
FROM (SELECT %(of_org)s::bigint AS of_org, %(of_queue)s::bigint AS of_queue) m
