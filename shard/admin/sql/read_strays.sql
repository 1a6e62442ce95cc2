-- Returns the jobs of a slot in this shard's table of exported jobs. Each queue has one row, with the ids of its jobs
-- and their rows as text. Any move or recovery may have put the jobs there. Without `older`, returns only jobs whose
-- ids were made within the last 7 days.
SELECT q.org, q.queue, array_agg(d.id::text) AS ids, array_agg(d.job)::text AS jobs
FROM (
    SELECT d AS job, d.id, d.queue_id
    FROM windrow.departing d
    WHERE d.slot = %(slot)s
        AND (
            %(older)s
            OR d.id >= rpad(
                lpad(to_hex((extract(epoch FROM now() - interval '7 days') * 1000)::bigint), 12, '0'), 32, '0'
            )::uuid
        )
    LIMIT %(rows)s
) d
CROSS JOIN LATERAL (SELECT q.org, q.queue FROM windrow.queue q WHERE q.queue_id = d.queue_id OFFSET 0) q
-- Other shards act on this answer, so it must survive a failover. The emitted message makes the commit wait for the
-- standby: see find_known.sql.
WHERE (SELECT pg_logical_emit_message(true, 'windrow', '')) IS NOT NULL
GROUP BY q.org, q.queue
ORDER BY q.org, q.queue
