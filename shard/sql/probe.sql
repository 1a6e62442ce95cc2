-- For each lane of these queues from its floor on: when its first live row is or becomes visible, where there is one.
-- One row. Takes no locks. Of paused queues too, of which a claim would give nothing: their floors are kept.
SELECT now() AS now, array_agg(first.queue_id) AS queue_ids, array_agg(first.priority) AS priorities,
    array_agg(first.visible_at) AS visible_at, array_agg(first.paused) AS paused
FROM (
    SELECT q.queue_id, p.priority::smallint AS priority, j.visible_at, w.paused
    FROM unnest(%(queue_ids)s::bigint[]) WITH ORDINALITY AS q (queue_id, turn)
    -- OFFSET 0 fence: by its number alone, as in claim.sql.
    CROSS JOIN LATERAL (SELECT w.paused FROM windrow.queue w WHERE w.queue_id = q.queue_id OFFSET 0) w
    CROSS JOIN generate_series(1, 9) AS p (priority)
    CROSS JOIN LATERAL (
        SELECT j.visible_at
        FROM windrow.job j
        WHERE j.queue_id = q.queue_id AND j.priority = p.priority
            AND j.visible_at >= timestamptz 'epoch'
                + (%(floors_us)s::bigint[])[(q.turn - 1) * 9 + p.priority] * interval '1 us'
        ORDER BY j.visible_at
        LIMIT 1
    ) j
) first
