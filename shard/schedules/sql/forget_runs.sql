-- Forgets runs of these schedules. Keeps the newest runs, the buffered runs, and the runs of backfills that are younger
-- than `backfill_us`.
DELETE FROM windrow.schedule_run r
WHERE (r.schedule_id, r.at) IN (
    SELECT old.schedule_id, old.at
    FROM unnest(%(schedules)s::uuid[]) AS n (id)
    CROSS JOIN LATERAL (
        SELECT k.at FROM windrow.schedule_run k WHERE k.schedule_id = n.id ORDER BY k.at DESC OFFSET %(kept)s LIMIT 1
    ) newest
    CROSS JOIN LATERAL (
        SELECT r.schedule_id, r.at
        FROM windrow.schedule_run r
        WHERE r.schedule_id = n.id AND r.at <= newest.at AND r.outcome <> 'buffered'
            AND (r.cause <> 'backfill' OR r.decided_at < now() - %(backfill_us)s * interval '1 us')
    ) old
)
