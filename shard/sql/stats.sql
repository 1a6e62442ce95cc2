-- Counts by state for queues of one org, with the age of the oldest ready job and the time of the next scheduled one.
SELECT
    q.queue,
    coalesce(live.scheduled, 0) AS scheduled, coalesce(live.ready, 0) AS ready, coalesce(live.leased, 0) AS leased,
    (SELECT count(*) FROM windrow.dead d WHERE d.queue_id = q.queue_id) AS dead,
    coalesce(done.succeeded, 0) AS succeeded, coalesce(done.cancelled, 0) AS cancelled,
    (extract(epoch FROM now() - live.oldest_ready) * 1000000)::bigint AS oldest_ready_age_us, live.next_due, q.paused
FROM windrow.queue q
LEFT JOIN LATERAL (
    SELECT
        count(*) FILTER (WHERE j.visible_at > now() AND j.lease IS NULL) AS scheduled,
        count(*) FILTER (WHERE j.visible_at <= now()) AS ready,
        count(*) FILTER (WHERE j.visible_at > now() AND j.lease IS NOT NULL) AS leased,
        min(j.visible_at) FILTER (WHERE j.visible_at <= now()) AS oldest_ready,
        min(j.visible_at) FILTER (WHERE j.visible_at > now() AND j.lease IS NULL) AS next_due
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
        SELECT c.state, c.queue_id FROM windrow.cold c WHERE c.queue_id & 4294967295 = q.org_id
    ) f
    WHERE %(include_finished)s AND f.queue_id = q.queue_id
) done ON true
WHERE q.org = %(org)s AND (%(queue)s = '' OR q.queue = %(queue)s)
    AND (
        q.listed
        OR EXISTS (SELECT FROM windrow.job j WHERE j.queue_id = q.queue_id)
        OR EXISTS (SELECT FROM windrow.dead d WHERE d.queue_id = q.queue_id)
    )
ORDER BY q.queue
LIMIT 1000
