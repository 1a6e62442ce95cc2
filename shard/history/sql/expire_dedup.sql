-- Forgets up to `rows` dedup keys whose windows are over, the oldest first. Skips keys that a running enqueue renews.
WITH gone AS (
    DELETE FROM windrow.dedup d
    WHERE d.ctid = ANY (ARRAY(
        SELECT over.ctid FROM windrow.dedup over WHERE over.until <= now() ORDER BY over.until LIMIT %(rows)s
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING 1
)
SELECT count(*) FROM gone
