-- Forgets dedup keys whose windows are over, up to `rows`, the oldest first. One that an enqueue takes anew is left alone.
WITH gone AS (
    DELETE FROM windrow.dedup d
    WHERE d.ctid = ANY (ARRAY(
        SELECT over.ctid FROM windrow.dedup over WHERE over.until <= now() ORDER BY over.until LIMIT %(rows)s
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING 1
)
SELECT count(*) FROM gone
