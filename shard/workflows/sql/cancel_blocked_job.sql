-- Cancels the job of a node if the job is blocked, and returns 1. Returns 0 if another session has locked the job, or
-- if the job is on another shard. Never waits for a lock, because the caller holds the lock of the workflow.
SELECT windrow.cancel_blocked(
    ARRAY(
        SELECT j.ctid
        FROM windrow.job j
        WHERE j.id = %(job_id)s::uuid AND {{org_of(j)}} = %(org_id)s AND {{is_blocked(j)}}
        FOR UPDATE SKIP LOCKED
    ),
    ARRAY[%(reason)s]
)
