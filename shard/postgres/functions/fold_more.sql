-- Takes in a portion of what a workflow has left. Returns the queues of the released jobs, and whether there is more.
-- Does nothing, and returns no queues, while others have its lock: so acks, which wait for it, come first.
CREATE OR REPLACE FUNCTION windrow.fold_more(org integer, workflow uuid, OUT released bigint[], OUT is_left boolean)
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    IF pg_try_advisory_xact_lock(17, (hashtextextended(workflow::text, org) & 1023)::integer) THEN
        -- The close of a slot waits for this transaction: see lock_workflows.
        PERFORM FROM windrow.owned_slot LIMIT 1;
        SELECT f.released, f.is_left INTO released, is_left
        FROM windrow.fold_portion(ARRAY[org], ARRAY[workflow]) f;
    ELSE
        is_left := true;
    END IF;
END
$$;
