-- Deletes the quarantines and the recorded crashes of these slots. Leaves out slots that do not have this state and
-- this epoch. For draining slots, run this statement when this shard has no more jobs of these slots. For slots that
-- have just arrived, this statement deletes rows from an earlier time at which this shard had these slots.
WITH queue AS MATERIALIZED (
    SELECT q.queue_id
    FROM windrow.owned_slot w
    -- For OFFSET 0, see read_queues.sql.
    CROSS JOIN LATERAL (SELECT o.org FROM windrow.org o WHERE o.slot = w.slot OFFSET 0) o
    CROSS JOIN LATERAL (SELECT q.queue_id FROM windrow.queue q WHERE q.org = o.org OFFSET 0) q
    WHERE w.slot = ANY (%(slots)s::smallint[]) AND w.state = %(state)s AND w.epoch = %(epoch)s
), crashes AS (
    DELETE FROM windrow.crash c USING queue WHERE c.queue_id = queue.queue_id
)
DELETE FROM windrow.quarantine k USING queue WHERE k.queue_id = queue.queue_id
