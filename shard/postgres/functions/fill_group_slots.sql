-- Gives the free slots of groups to the first jobs that wait or have become due, and overtakes none of them. The caller
-- holds the locks of their buckets, and took them in an earlier statement. Returns how many jobs got slots.
CREATE OR REPLACE FUNCTION windrow.fill_group_slots(queues bigint[], groups text[]) RETURNS integer
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    filled integer;
BEGIN
    PERFORM windrow.await_group_slots(queues, groups);
    UPDATE windrow.job j
    -- Never before now(): claims do not look below the floor.
    SET group_slot = first.slot, visible_at = greatest(j.run_at, clock_timestamp())
    FROM (
        SELECT locked.ctid, g.free[row_number() OVER (PARTITION BY g.turn)] AS slot
        FROM (
            SELECT
                n.*,
                ARRAY(
                    SELECT s.slot::smallint
                    FROM generate_series(1, coalesce(q.group_concurrency, 1)) AS s (slot)
                    WHERE NOT EXISTS (
                        SELECT FROM windrow.job h
                        WHERE h.queue_id = n.queue_id AND h.group_key = n.group_key AND h.group_slot = s.slot::smallint
                        OFFSET 0
                    )
                ) AS free
            FROM unnest(queues, groups) WITH ORDINALITY AS n (queue_id, group_key, turn)
            -- While the queue's slot moves, neither shard gives group slots: so a group has at most k of them on both
            -- together.
            JOIN windrow.queue q ON q.queue_id = n.queue_id
            JOIN windrow.owned_slot o ON o.slot = q.slot AND o.state = 'owned' AND NOT o.arriving
            WHERE EXISTS (
                SELECT FROM windrow.job w
                WHERE w.queue_id = n.queue_id AND w.group_key = n.group_key AND w.group_slot IS NULL
                    AND NOT isfinite(w.visible_at) AND isfinite(w.run_at)
                OFFSET 0
            )
            OFFSET 0
        ) g
        CROSS JOIN LATERAL (
            -- If another session has locked one of the first jobs, do not wait: it may wait for this bucket. It ends or
            -- changes that job, and then fills the group itself. Never take a later job instead, out of order.
            SELECT f.ctid
            FROM windrow.job f
            WHERE f.ctid = ANY (ARRAY(
                SELECT w.ctid
                FROM windrow.job w
                WHERE w.queue_id = g.queue_id AND w.group_key = g.group_key AND w.group_slot IS NULL
                    AND NOT isfinite(w.visible_at) AND isfinite(w.run_at)
                ORDER BY w.run_at, w.id
                LIMIT cardinality(g.free)
            )) AND NOT isfinite(f.visible_at) AND isfinite(f.run_at) AND f.group_slot IS NULL
                -- Another session has locked a job that became due earlier. The next claim or sweep goes on.
                AND NOT EXISTS (
                    SELECT FROM windrow.job d
                    WHERE d.queue_id = g.queue_id AND d.group_key = g.group_key AND d.group_slot IS NULL
                        AND isfinite(d.visible_at) AND d.run_at < f.run_at
                    OFFSET 0
                )
            FOR UPDATE SKIP LOCKED
        ) locked
        OFFSET 0
    ) first
    WHERE j.ctid = first.ctid;
    GET DIAGNOSTICS filled = ROW_COUNT;
    RETURN filled;
END
$$;
