-- Returns the present time, and the time at which a router must look at the first schedule of the slots that this shard
-- owns. NULL: no schedule has such a time. Reads only the first entry of one index, unless slots have just left this
-- shard.
SELECT now() AS now, (
    SELECT s.wake_at
    FROM windrow.schedule s
    WHERE s.wake_at IS NOT NULL
        AND {{is_fired_here(s)}}
    ORDER BY s.wake_at
    LIMIT 1
) AS wake_at
