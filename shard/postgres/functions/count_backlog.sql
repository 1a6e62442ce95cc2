-- How many jobs of an org, or of one of its queues ('': all), have not ended, or how many bytes of payload and
-- attributes they have; but at most `counted_max`. Reads the ready index, and stops there.
CREATE OR REPLACE FUNCTION windrow.count_backlog(
    of_org text, of_queue text, in_bytes boolean, counted_max bigint
) RETURNS bigint
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
