-- Counts the jobs of one org's queues by state. Also returns the age of the oldest ready job and the time of the next
-- scheduled job. Exported jobs, which are about to leave this shard, are counted separately, with the number of their
-- chunk. The last two columns name the last chunk that this shard exported or imported. The caller compares the chunks
-- of two shards to find out whether both shards count the same jobs.
SELECT
    q.queue,
    coalesce(live.blocked, 0) AS blocked, coalesce(live.scheduled, 0) AS scheduled, coalesce(live.ready, 0) AS ready, coalesce(live.leased, 0) AS leased,
    (SELECT count(*) FROM windrow.dead d WHERE d.queue_id = q.queue_id) AS dead,
    coalesce(done.succeeded, 0) AS succeeded, coalesce(done.cancelled, 0) AS cancelled,
    (extract(epoch FROM now() - live.oldest_ready) * 1000000)::bigint AS oldest_ready_age_us, live.next_due, q.paused,
    coalesce(leaving.blocked, 0) AS leaving_blocked, coalesce(leaving.scheduled, 0) AS leaving_scheduled, coalesce(leaving.ready, 0) AS leaving_ready,
    coalesce(leaving.dead, 0) AS leaving_dead,
    (extract(epoch FROM now() - leaving.oldest_ready) * 1000000)::bigint AS leaving_oldest_ready_age_us,
    leaving.next_due AS leaving_next_due, leaving.epoch AS leaving_epoch, leaving.chunk AS leaving_chunk,
    slot.epoch AS slot_epoch, slot.chunk AS slot_chunk
FROM windrow.queue q
LEFT JOIN windrow.owned_slot slot ON slot.slot = q.slot
LEFT JOIN (
    SELECT
        d.slot, d.queue_id, max(d.epoch) AS epoch, max(d.chunk) AS chunk,
        count(*) FILTER (WHERE d.reason IS NULL AND {{is_blocked(d)}}) AS blocked,
        count(*) FILTER (WHERE d.reason IS NULL AND d.run_at > now() AND NOT {{is_blocked(d)}}) AS scheduled,
        count(*) FILTER (WHERE d.reason IS NULL AND d.run_at <= now()) AS ready,
        count(*) FILTER (WHERE d.reason IS NOT NULL) AS dead,
        min(d.run_at) FILTER (WHERE d.reason IS NULL AND d.run_at <= now()) AS oldest_ready,
        min(d.run_at) FILTER (WHERE d.reason IS NULL AND d.run_at > now() AND NOT {{is_blocked(d)}}) AS next_due
    FROM windrow.departing d
    WHERE d.slot = (SELECT o.slot FROM windrow.org o WHERE o.org = %(org)s)
    GROUP BY d.slot, d.queue_id
) leaving ON leaving.slot = q.slot AND leaving.queue_id = q.queue_id
LEFT JOIN LATERAL (
    SELECT
        count(*) FILTER (WHERE {{is_blocked(j)}}) AS blocked,
        count(*) FILTER (WHERE {{is_later(j)}} AND j.lease IS NULL) AS scheduled,
        count(*) FILTER (WHERE {{is_due(j)}}) AS ready,
        count(*) FILTER (WHERE j.visible_at > now() AND j.lease IS NOT NULL) AS leased,
        min(j.visible_at) FILTER (WHERE j.visible_at <= now()) AS oldest_ready,
        min(j.visible_at) FILTER (WHERE {{is_later(j)}} AND j.lease IS NULL) AS next_due
    FROM windrow.job j
    WHERE j.queue_id = q.queue_id
) live ON true
LEFT JOIN LATERAL (
    SELECT
        count(*) FILTER (WHERE f.state = 'succeeded') AS succeeded,
        count(*) FILTER (WHERE f.state = 'cancelled') AS cancelled
    FROM (
        SELECT h.state, h.queue_id FROM windrow.finished h
        UNION ALL
        SELECT c.state, c.queue_id FROM windrow.cold c WHERE {{org_of(c)}} = q.org_id
    ) f
    WHERE %(include_finished)s AND f.queue_id = q.queue_id
) done ON true
WHERE q.org = %(org)s AND (%(queue)s = '' OR q.queue = %(queue)s)
    AND (
        q.listed
        OR EXISTS (SELECT FROM windrow.job j WHERE j.queue_id = q.queue_id)
        OR EXISTS (SELECT FROM windrow.dead d WHERE d.queue_id = q.queue_id)
        OR leaving.queue_id IS NOT NULL
    )
ORDER BY q.queue
LIMIT 1000
