-- Makes dead jobs ready at once, with fresh attempts. They keep their history. They do not take their live keys again:
-- other jobs may have them by now, also on another shard. Returns the jobs with their queues, and the jobs on their way
-- to another shard (departing), which are not changed.
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
