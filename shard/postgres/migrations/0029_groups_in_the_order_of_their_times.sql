-- LOCKS SHARE: job
-- READS: job
-- Jobs of a group run in the order in which they became due, also a scheduled job that became due while no claim looked.

-- Jobs of groups that have no slot and do not wait for one yet: they are not due, or nobody has noticed that they are.
CREATE INDEX job_group_later ON windrow.job (queue_id, group_key, run_at)
    WHERE group_key IS NOT NULL AND group_slot IS NULL AND isfinite(visible_at);

-- Lets the first jobs of groups that have become due wait for slots, as the next claim would: for each group as many as it
-- may have slots. The caller holds the locks of their buckets. Jobs that other sessions have locked are left.
CREATE FUNCTION windrow.await_group_slots(queues bigint[], groups text[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    -- A condition with the volatile clock_timestamp() would be no condition of the index.
    moment timestamptz := clock_timestamp();
BEGIN
    UPDATE windrow.job j SET visible_at = 'infinity'
    FROM (
        SELECT d.ctid
        FROM unnest(queues, groups) AS n (queue_id, group_key)
        JOIN windrow.queue q ON q.queue_id = n.queue_id
        CROSS JOIN LATERAL (
            SELECT d.ctid
            FROM windrow.job d
            WHERE d.queue_id = n.queue_id AND d.group_key = n.group_key AND d.group_slot IS NULL
                AND isfinite(d.visible_at) AND d.run_at <= moment
            ORDER BY d.run_at
            LIMIT coalesce(q.group_concurrency, 1)
            FOR UPDATE SKIP LOCKED
        ) d
        OFFSET 0
    ) due
    WHERE j.ctid = due.ctid;
END
$$;

-- This is the function of 0014_groups.sql, except that jobs which have become due take part, and that none of them is
-- overtaken.
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

-- This is the function of 0014_groups.sql, except that a job which has become due is not overtaken by the new one.
CREATE OR REPLACE FUNCTION windrow.wait_for_slot() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    is_first boolean := current_setting('windrow.groups_locked', true) = 'on';
BEGIN
    IF is_first AND EXISTS (
        SELECT FROM windrow.job d
        WHERE d.queue_id = NEW.queue_id AND d.group_key = NEW.group_key AND d.group_slot IS NULL
            AND isfinite(d.visible_at) AND d.run_at < NEW.run_at
    ) THEN
        -- If another session has locked that job, no slot is given: the new job waits, too.
        is_first := windrow.fill_group_slots(ARRAY[NEW.queue_id], ARRAY[NEW.group_key]) > 0;
    END IF;
    IF is_first AND NOT EXISTS (
        SELECT FROM windrow.job w
        WHERE w.queue_id = NEW.queue_id AND w.group_key = NEW.group_key AND w.group_slot IS NULL
            AND NOT isfinite(w.visible_at) AND isfinite(w.run_at)
    ) THEN
        SELECT s.slot INTO NEW.group_slot
        FROM windrow.queue q
        JOIN windrow.owned_slot o ON o.slot = q.slot AND o.state = 'owned' AND NOT o.arriving
        CROSS JOIN generate_series(1, coalesce(q.group_concurrency, 1)) AS s (slot)
        WHERE q.queue_id = NEW.queue_id AND NOT EXISTS (
            SELECT FROM windrow.job h
            WHERE h.queue_id = NEW.queue_id AND h.group_key = NEW.group_key AND h.group_slot = s.slot::smallint
            OFFSET 0
        )
        LIMIT 1;
    END IF;
    IF NEW.group_slot IS NULL THEN
        NEW.visible_at := 'infinity';
    END IF;
    RETURN NEW;
END
$$;
