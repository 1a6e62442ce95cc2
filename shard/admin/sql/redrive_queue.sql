-- Redrives up to `rows` of a queue's dead jobs, beginning with the job that died first. Attempts are counted from the
-- beginning again. The jobs become due one after another, `gap_us` apart. The first job becomes due after `ahead` times
-- `gap_us`, because `ahead` jobs that earlier calls have redriven become due before that job. If `gap_us` is 0, all
-- jobs become due at once. The jobs keep their history. They do not get their live keys back, because other jobs, on
-- this or another shard, may have these keys by now.
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
), turns AS (
    SELECT
        chosen.*,
        now() + (%(ahead)s::bigint + row_number() OVER (ORDER BY chosen.finished_at, chosen.id) - 1)
            * %(gap_us)s::bigint * interval '1 us' AS due
    FROM chosen
)
INSERT INTO windrow.job (
    id, queue_id, enqueued_at, run_at, visible_at, priority, max_attempts, {{kept_content}}, history
)
SELECT
    c.id, c.queue_id, c.enqueued_at, c.due, c.due, c.priority, c.max_attempts, {{unkeyed_content(c)}}, c.history
FROM turns c
RETURNING id::text
