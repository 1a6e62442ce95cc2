-- Lets the first jobs of groups that have become due wait for slots, as the next claim would: for each group as many as
-- it may have slots. The caller holds the locks of their buckets. Jobs that other sessions have locked are left.
CREATE OR REPLACE FUNCTION windrow.await_group_slots(queues bigint[], groups text[]) RETURNS void
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
