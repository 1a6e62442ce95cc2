-- Changes what is set, puts back what is reset, leaves the rest.
UPDATE windrow.queue AS q
SET
    retry = CASE WHEN 'retry' = ANY (%(reset)s::text[]) THEN NULL ELSE coalesce(%(retry)s::jsonb, q.retry) END,
    max_attempts = CASE
        WHEN 'max_attempts' = ANY (%(reset)s::text[]) THEN NULL
        ELSE coalesce(%(max_attempts)s::smallint, q.max_attempts)
    END,
    paused = coalesce(%(paused)s::boolean, q.paused),
    listed = true
WHERE q.org = %(org)s AND q.queue = %(queue)s
RETURNING q.queue, q.retry::text, q.max_attempts, q.paused, q.created_at
