-- Puts a queue's dead jobs back, the oldest death first: ready at once, with fresh attempts. Their history stays. They do
-- not take their live keys again: other jobs may have them by now, also on another shard.
WITH chosen AS (
    DELETE FROM windrow.dead d
    WHERE d.ctid = ANY (ARRAY(
        SELECT aside.ctid
        FROM windrow.dead aside
        JOIN windrow.queue q ON q.queue_id = aside.queue_id
        WHERE q.org = %(org)s AND q.queue = %(queue)s AND (%(kind)s = '' OR aside.kind = %(kind)s)
            AND (%(after_us)s::bigint IS NULL OR aside.finished_at >= timestamptz 'epoch' + %(after_us)s * interval '1 us')
            AND (%(before_us)s::bigint IS NULL OR aside.finished_at < timestamptz 'epoch' + %(before_us)s * interval '1 us')
        ORDER BY aside.finished_at
        LIMIT %(rows)s
        FOR UPDATE OF aside SKIP LOCKED
    ))
    RETURNING d.*
)
INSERT INTO windrow.job (
    id, queue_id, enqueued_at, run_at, visible_at, priority, max_attempts, {{kept_content}}, history
)
SELECT
    c.id, c.queue_id, c.enqueued_at, now(), now(), c.priority, c.max_attempts, {{unkeyed_content(c)}}, c.history
FROM chosen c
RETURNING id::text
