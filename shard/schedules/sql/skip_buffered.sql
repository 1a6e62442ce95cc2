-- Skips the buffered runs of these schedules, because the shard lost history, and may have stored these runs before the
-- loss. Returns how many runs it skipped.
WITH skipped AS (
    UPDATE windrow.schedule_run r
    SET outcome = 'skipped', skipped_for = 'recovered', decided_at = now()
    FROM unnest(%(schedules)s::uuid[]) AS n (id)
    WHERE r.schedule_id = n.id AND r.outcome = 'buffered'
    RETURNING 1
)
SELECT count(*) FROM skipped
