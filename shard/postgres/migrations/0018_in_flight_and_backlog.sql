-- LOCKS SHARE: job
-- LOCKS ACCESS EXCLUSIVE: usage_limit
-- READS: job, usage_limit
-- Limits of how many jobs are leased at a time (docs/decisions/0052-leases-in-flight-are-counted.md), and of how many have
-- not ended (docs/decisions/0053-backlogs-are-counted-by-those-who-add-to-them.md).
ALTER TABLE windrow.usage_limit
    DROP CONSTRAINT usage_limit_measure_check,
    ADD CONSTRAINT usage_limit_measure_check CHECK (
        measure IN ('jobs', 'bytes', 'starts', 'in_flight', 'backlog', 'backlog_bytes')
    ),
    DROP CONSTRAINT usage_limit_interval_us_check,
    -- A limit of what there is at a time has no interval: 0.
    ADD CONSTRAINT usage_limit_interval_us_check CHECK (
        CASE
            WHEN measure IN ('in_flight', 'backlog', 'backlog_bytes') THEN interval_us = 0
            ELSE interval_us BETWEEN 1000000 AND 86400000000
        END
    );

-- The leases that count for such a limit: those with negative numbers (shard/lease_token.py). Other leases have no entry
-- here. By org, then by queue.
CREATE INDEX job_in_flight ON windrow.job ((queue_id & 4294967295), queue_id, visible_at) WHERE lease < 0;

-- How many jobs of an org, or of one of its queues, are leased with numbers that count, but at most `counted_max`.
CREATE FUNCTION windrow.count_in_flight(of_queue bigint, whole_org boolean, counted_max bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF whole_org THEN
        RETURN (
            SELECT count(*)
            FROM (
                SELECT FROM windrow.job j
                WHERE j.queue_id & 4294967295 = of_queue & 4294967295 AND j.lease < 0 AND j.visible_at > now()
                LIMIT counted_max
            ) counted
        );
    END IF;
    RETURN (
        SELECT count(*)
        FROM (
            SELECT FROM windrow.job j
            WHERE j.queue_id & 4294967295 = of_queue & 4294967295 AND j.queue_id = of_queue AND j.lease < 0
                AND j.visible_at > now()
            LIMIT counted_max
        ) counted
    );
END
$$;

-- For a claim: how many jobs of a queue may be leased now. NULL: no limit. Until the end of the transaction no other claim
-- of this org that is limited gets an answer. VOLATILE, so that what it counts includes all that was committed before it
-- got the lock.
CREATE FUNCTION windrow.room_in_flight(of_queue bigint, org_max bigint, queue_max bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    room bigint := 9223372036854775807;
BEGIN
    PERFORM pg_advisory_xact_lock(15, (of_queue & 4294967295)::integer);
    IF org_max IS NOT NULL THEN
        room := org_max - windrow.count_in_flight(of_queue, true, org_max);
    END IF;
    IF queue_max IS NOT NULL AND room > 0 THEN
        room := least(room, queue_max - windrow.count_in_flight(of_queue, false, queue_max));
    END IF;
    RETURN greatest(room, 0);
END
$$;

-- How many jobs of an org, or of one of its queues ('': all), have not ended, or how many bytes of payload and attributes
-- they have; but at most `counted_max`. Reads the ready index, and stops there.
CREATE FUNCTION windrow.count_backlog(of_org text, of_queue text, in_bytes boolean, counted_max bigint) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    total bigint := 0;
    number bigint;
    size bigint;
BEGIN
    FOR number IN
        SELECT q.queue_id FROM windrow.queue q WHERE q.org = of_org AND (of_queue = '' OR q.queue = of_queue)
    LOOP
        IF in_bytes THEN
            FOR size IN
                SELECT octet_length(j.payload) + coalesce(octet_length(j.attributes::text), 0)
                FROM windrow.job j
                WHERE j.queue_id = number
                ORDER BY j.queue_id, j.priority, j.visible_at
            LOOP
                total := total + size;
                EXIT WHEN total >= counted_max;
            END LOOP;
        ELSE
            total := total + (
                SELECT count(*)
                FROM (
                    SELECT
                    FROM windrow.job j
                    WHERE j.queue_id = number
                    ORDER BY j.queue_id, j.priority, j.visible_at
                    LIMIT counted_max - total
                ) counted
            );
        END IF;
        EXIT WHEN total >= counted_max;
    END LOOP;
    RETURN least(total, counted_max);
END
$$;
