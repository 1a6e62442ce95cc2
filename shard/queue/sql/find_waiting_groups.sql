-- Returns at most groups_max groups of these queues with jobs that wait for a group slot, and whether each group has a
-- free slot. Free slots are rare, because the transaction that frees a slot also fills it. Steps from group to group in
-- an index. In the first queue, begins after the group `after`. Leaves out queues of orgs that move.
SELECT g.queue_id, g.group_key, g.taken < g.slots_max AS has_free
FROM (
    SELECT
        q.queue_id, w.group_key, s.slots_max,
        (
            SELECT count(*)
            FROM windrow.job h
            WHERE h.queue_id = q.queue_id AND h.group_key = w.group_key AND h.group_slot BETWEEN 1 AND s.slots_max
        ) AS taken
    FROM unnest(%(queue_ids)s::bigint[]) WITH ORDINALITY AS q (queue_id, turn)
    -- OFFSET 0 makes Postgres find the queue by its id, as in claim.sql.
    CROSS JOIN LATERAL (
        SELECT coalesce(c.group_concurrency, 1)::smallint AS slots_max, c.slot
        FROM windrow.queue c
        WHERE c.queue_id = q.queue_id
        OFFSET 0
    ) s
    CROSS JOIN LATERAL (
        WITH RECURSIVE waiting AS (
            (
                SELECT j.group_key
                FROM windrow.job j
                WHERE j.queue_id = q.queue_id AND j.group_key > CASE WHEN q.turn = 1 THEN %(after)s::text ELSE '' END
                    AND j.group_key IS NOT NULL AND j.group_slot IS NULL AND NOT isfinite(j.visible_at)
                    AND isfinite(j.run_at)
                ORDER BY j.group_key
                LIMIT 1
            )
            UNION ALL
            SELECT next.group_key
            FROM waiting
            CROSS JOIN LATERAL (
                SELECT j.group_key
                FROM windrow.job j
                WHERE j.queue_id = q.queue_id AND j.group_key > waiting.group_key
                    AND j.group_key IS NOT NULL AND j.group_slot IS NULL AND NOT isfinite(j.visible_at)
                    AND isfinite(j.run_at)
                ORDER BY j.group_key
                LIMIT 1
            ) next
        )
        SELECT waiting.group_key FROM waiting
    ) w
    WHERE EXISTS (SELECT FROM windrow.owned_slot o WHERE o.slot = s.slot AND o.state = 'owned' AND NOT o.arriving)
    LIMIT %(groups_max)s
) g
