-- Locks the buckets of groups until the end of the transaction. A transaction locks buckets once, in ascending order,
-- so that two cannot deadlock. Buckets, because a lock for each group could fill the table of locks. Statements that
-- begin after it see what the holders before it have committed.
CREATE OR REPLACE FUNCTION windrow.lock_group_buckets(queues bigint[], groups text[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(14, b.bucket)
    FROM (
        SELECT DISTINCT (hashtextextended(n.group_key, n.queue_id) & 1023)::integer AS bucket
        FROM unnest(queues, groups) AS n (queue_id, group_key)
        WHERE n.group_key IS NOT NULL
        ORDER BY bucket
    ) b;
END
$$;
