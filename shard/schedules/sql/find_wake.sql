-- Returns the time, and when the first schedule of the slots that this shard owns must be looked at; NULL: none sleeps
-- with a time. Reads the first entry of one index, unless slots have just left this shard.
SELECT now() AS now, (
    SELECT s.wake_at
    FROM windrow.schedule s
    WHERE s.wake_at IS NOT NULL
        -- OFFSET 0 fences: find org and slot by their numbers, for one schedule after another.
        AND (
            SELECT w.state = 'owned'
            FROM (SELECT o.slot FROM windrow.org o WHERE o.org_id = s.org_id OFFSET 0) o
            CROSS JOIN LATERAL (SELECT w.state FROM windrow.owned_slot w WHERE w.slot = o.slot OFFSET 0) w
        )
    ORDER BY s.wake_at
    LIMIT 1
) AS wake_at
