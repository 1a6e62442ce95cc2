-- Ends the quarantine of a kind, and forgets its crashes. Returns whether the kind was quarantined. No row: the queue
-- does not exist, or its slot is not in the state that add_quarantine.sql demands.
WITH queue AS MATERIALIZED (
    SELECT q.queue_id
    FROM windrow.queue q
    JOIN windrow.owned_slot s ON s.slot = q.slot
    WHERE q.org = %(org)s AND q.queue = %(queue)s
        AND CASE
            WHEN %(draining)s THEN s.state = 'draining' AND s.epoch = %(epoch)s
            ELSE s.state = 'owned' AND s.epoch <= %(epoch)s
        END
), released AS (
    DELETE FROM windrow.quarantine k USING queue WHERE k.queue_id = queue.queue_id AND k.kind = %(kind)s
    RETURNING k.kind
), forgotten AS (
    DELETE FROM windrow.crash c USING queue WHERE c.queue_id = queue.queue_id AND c.kind = %(kind)s
)
SELECT EXISTS (SELECT FROM released) FROM queue
