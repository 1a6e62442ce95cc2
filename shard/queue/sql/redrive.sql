-- Makes dead jobs ready at once. Their attempts are counted from 1 again. The jobs keep their history, but do not take
-- their live keys again, because other jobs, on this or another shard, may have these keys by now. Returns the jobs
-- with their queues. Also returns the jobs that are on their way to another shard (departing), which it does not
-- change.
WITH chosen AS (
    DELETE FROM windrow.dead d
    WHERE d.id = ANY (%(ids)s::uuid[])
        AND {{org_of(d)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    RETURNING d.*
), redriven AS (
    INSERT INTO windrow.job (
        id, queue_id, enqueued_at, run_at, visible_at, priority, max_attempts, {{kept_content}}, history
    )
    SELECT
        c.id, c.queue_id, c.enqueued_at, now(), now(), c.priority, c.max_attempts, {{unkeyed_content(c)}}, c.history
    FROM chosen c
    RETURNING id, queue_id
)
SELECT r.id::text, r.queue_id FROM redriven r
UNION ALL
SELECT d.id::text, NULL
FROM windrow.departing d
WHERE d.id = ANY (%(ids)s::uuid[])
    AND {{org_of(d)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
