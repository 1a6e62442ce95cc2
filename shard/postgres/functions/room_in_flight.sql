-- For a claim: how many jobs of a queue may be leased now. NULL: no limit. Until the end of the transaction no other
-- claim of this org that is limited gets an answer. VOLATILE, so that what it counts includes all that was committed
-- before it got the lock.
CREATE OR REPLACE FUNCTION windrow.room_in_flight(of_queue bigint, org_max bigint, queue_max bigint) RETURNS bigint
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
