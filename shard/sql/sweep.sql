-- For each lane: where its floor belongs. That is the first row below now() that could still be claimed, or now() less the
-- guard where there is none. Looks from the beginning of time, takes no locks, and so finds what committed late (I7).
SELECT
    l.queue_id, l.priority,
    least(
        now() - %(guard_us)s * interval '1 us',
        (
            SELECT j.visible_at
            FROM windrow.job j
            WHERE j.queue_id = l.queue_id AND j.priority = l.priority AND j.visible_at <= now()
            ORDER BY j.visible_at
            LIMIT 1
        )
    ) AS floor
FROM unnest(%(lane_ids)s::bigint[], %(lane_priorities)s::smallint[]) AS l (queue_id, priority)
