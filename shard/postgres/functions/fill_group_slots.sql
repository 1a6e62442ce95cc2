-- Gives the free slots of groups to the first jobs that wait or have become due, and overtakes none of them. The caller
-- holds the locks of their buckets, and took them in an earlier statement. Returns how many jobs got slots. OFFSET 0
-- fences: Postgres looks each group up by itself, and never joins all groups with all jobs that wait.
CREATE OR REPLACE FUNCTION windrow.fill_group_slots(queues bigint[], groups text[]) RETURNS integer
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    -- A condition with the volatile clock_timestamp() would be no condition of the index.
    moment timestamptz := clock_timestamp();
    -- The groups with jobs that wait or have become due, and the number of slots of each.
    awaited_queues bigint[];
    awaited_groups text[];
    slots_max integer[];
    has_late boolean;
    filled integer;
BEGIN
    -- Most groups have no such job.
    WITH giving AS MATERIALIZED (SELECT q.queue_id, q.slots_max FROM windrow.slots_of_groups(queues) q)
    SELECT
        array_agg(g.queue_id), array_agg(g.group_key), array_agg(g.slots_max), bool_or(g.is_late)
    INTO awaited_queues, awaited_groups, slots_max, has_late
    FROM (
        SELECT
            n.queue_id, n.group_key, q.slots_max,
            EXISTS (
                SELECT FROM windrow.job d
                WHERE d.queue_id = n.queue_id AND d.group_key = n.group_key AND d.group_slot IS NULL
                    AND isfinite(d.visible_at) AND d.run_at <= moment
                OFFSET 0
            ) AS is_late
        FROM (SELECT DISTINCT u.* FROM unnest(queues, groups) AS u (queue_id, group_key)) n
        JOIN giving q USING (queue_id)
        OFFSET 0
    ) g
    WHERE g.is_late OR EXISTS (
        SELECT FROM windrow.job w
        WHERE w.queue_id = g.queue_id AND w.group_key = g.group_key AND w.group_slot IS NULL
            AND NOT isfinite(w.visible_at) AND isfinite(w.run_at)
        OFFSET 0
    );
    IF awaited_queues IS NULL THEN
        RETURN 0;
    END IF;

    IF has_late THEN
        -- From now on the first jobs that have become due wait, as the next claim would let them: for each group as many
        -- as it may have slots. Jobs that other sessions have locked are left.
        UPDATE windrow.job j SET visible_at = 'infinity'
        FROM (
            SELECT d.ctid
            FROM unnest(awaited_queues, awaited_groups, slots_max) AS n (queue_id, group_key, slots_max)
            CROSS JOIN LATERAL (
                SELECT d.ctid
                FROM windrow.job d
                WHERE d.queue_id = n.queue_id AND d.group_key = n.group_key AND d.group_slot IS NULL
                    AND isfinite(d.visible_at) AND d.run_at <= moment
                ORDER BY d.run_at
                LIMIT n.slots_max
                FOR UPDATE SKIP LOCKED
            ) d
            OFFSET 0
        ) due
        WHERE j.ctid = due.ctid;
    END IF;

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
                    FROM generate_series(1, n.slots_max) AS s (slot)
                    WHERE s.slot <> ALL (held.slots)
                    ORDER BY s.slot
                    -- Slots above slots_max count, too: it was larger when their jobs got them.
                    LIMIT greatest(0, n.slots_max - cardinality(held.slots))
                ) AS free
            FROM unnest(awaited_queues, awaited_groups, slots_max) WITH ORDINALITY
                AS n (queue_id, group_key, slots_max, turn)
            CROSS JOIN LATERAL (
                SELECT coalesce(array_agg(h.group_slot), '{}') AS slots
                FROM windrow.job h
                WHERE h.queue_id = n.queue_id AND h.group_key = n.group_key AND h.group_slot IS NOT NULL
                OFFSET 0
            ) held
            OFFSET 0
        ) g
        CROSS JOIN LATERAL (
            -- If another session has locked one of the first jobs, skip the job: that session may wait for the lock of
            -- this group. It ends or changes the job, and then fills the group itself. Never take a later job instead.
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
