-- How many jobs of an org, or of one of its queues, are leased with numbers that count, but at most `counted_max`.
CREATE OR REPLACE FUNCTION windrow.count_in_flight(
    of_queue bigint, whole_org boolean, counted_max bigint
) RETURNS bigint
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
