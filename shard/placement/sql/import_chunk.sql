-- Stores jobs that were exported from another shard. A chunk is stored only if it is the next chunk of its slot, and so
-- only once. Returns the slots whose chunks were stored.
WITH taken AS (
    UPDATE windrow.owned_slot o SET chunk = n.chunk
    FROM unnest(%(slots)s::smallint[], %(chunks)s::integer[]) AS n (slot, chunk)
    WHERE o.slot = n.slot AND o.state = 'owned' AND o.epoch = %(epoch)s AND o.chunk = n.chunk - 1
    RETURNING o.slot
), arrived AS MATERIALIZED (
    SELECT q.here, d.*
    FROM unnest(%(of_slots)s::smallint[], %(orgs)s::text[], %(queues)s::text[], %(jobs)s::text[])
        AS n (slot, org, queue, jobs)
    -- If a queue does not exist on this shard, its id is NULL. Then the NOT NULL constraint makes the whole statement
    -- fail, so nothing is stored.
    CROSS JOIN LATERAL (
        SELECT (SELECT q.queue_id FROM windrow.queue q WHERE q.org = n.org AND q.queue = n.queue) AS here OFFSET 0
    ) q
    CROSS JOIN LATERAL unnest(n.jobs::windrow.departing[]) d
    WHERE n.slot IN (SELECT taken.slot FROM taken)
), live AS (
    INSERT INTO windrow.job (
        id, queue_id, enqueued_at, run_at, visible_at, expires_at, priority, attempt, max_attempts,
        {{kept_content}}, history, group_slot
    )
    SELECT
        a.id, a.here, a.enqueued_at, a.run_at, a.run_at, a.expires_at, a.priority, a.attempt, a.max_attempts,
        {{kept_content(a)}}, a.history, a.group_slot
    FROM arrived a
    WHERE a.reason IS NULL
), aside AS (
    INSERT INTO windrow.dead (
        id, queue_id, enqueued_at, run_at, finished_at, lease, leased_at, expires_at, priority, attempt, max_attempts,
        {{kept_content}}, worker, history, reason
    )
    SELECT
        a.id, a.here, a.enqueued_at, a.run_at, a.finished_at, a.lease, a.leased_at, a.expires_at, a.priority, a.attempt,
        a.max_attempts, {{kept_content(a)}}, a.worker, a.history, a.reason
    FROM arrived a
    WHERE a.reason IS NOT NULL
), counted AS (
    INSERT INTO windrow.tally (org_id, accepted)
    SELECT (a.here & 4294967295)::integer, count(*) FROM arrived a GROUP BY 1
)
SELECT taken.slot FROM taken
