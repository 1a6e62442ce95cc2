-- Changes what is set, puts back what is reset, leaves the rest. Where the slot is owned, by a caller who knows how it came
-- here; or where it drains, in the move that the caller knows.
UPDATE windrow.queue AS q
SET
    retry = CASE WHEN 'retry' = ANY (%(reset)s::text[]) THEN NULL ELSE coalesce(%(retry)s::jsonb, q.retry) END,
    max_attempts = CASE
        WHEN 'max_attempts' = ANY (%(reset)s::text[]) THEN NULL
        ELSE coalesce(%(max_attempts)s::smallint, q.max_attempts)
    END,
    retention = CASE
        WHEN 'retention_days' = ANY (%(reset)s::text[]) THEN NULL
        ELSE coalesce(%(retention)s::smallint, q.retention)
    END,
    paused = coalesce(%(paused)s::boolean, q.paused),
    listed = true
FROM windrow.owned_slot s
WHERE q.org = %(org)s AND q.queue = %(queue)s
    AND s.slot = q.slot
    AND CASE
        WHEN %(draining)s THEN s.state = 'draining' AND s.epoch = %(epoch)s
        ELSE s.state = 'owned' AND s.epoch <= %(epoch)s
    END
RETURNING q.queue, q.retry::text, q.max_attempts, q.kept, q.paused, q.created_at
