-- LOCKS ACCESS EXCLUSIVE: job, queue
-- READS: job, queue
-- Kinds whose jobs keep ending their workers (docs/decisions/0064-kinds-that-crash-their-workers.md).

-- After how many crashes in a row a kind of the queue's jobs is quarantined. NULL: never.
ALTER TABLE windrow.queue ADD COLUMN quarantine_after smallint CHECK (quarantine_after BETWEEN 1 AND 1000);

-- Crashes that no sweep has judged yet: a lease of this job expired, and so did the one before, or it was the last that the
-- job may have. They are appended by the claims that find them, at most one for each kind and claim.
CREATE TABLE windrow.crash (
    queue_id bigint NOT NULL,
    kind text COLLATE "C" NOT NULL,
    job_id uuid NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX crash_kind ON windrow.crash (queue_id, kind);

-- The kinds that are quarantined: claims set their jobs aside instead of leasing them.
CREATE TABLE windrow.quarantine (
    queue_id bigint NOT NULL,
    kind text COLLATE "C" NOT NULL,
    since timestamptz NOT NULL DEFAULT now(),
    -- Crashes that led to it, and trials that crashed.
    crashes integer NOT NULL CHECK (crashes >= 0),
    -- Why an operator did it. NULL: crashes did.
    reason text,
    -- When one of its jobs is let through, and how long the pause before it is. NULL: never; an operator releases the kind.
    next_trial_at timestamptz,
    pause_s integer NOT NULL CHECK (pause_s > 0),
    -- The job that is let through now, and since when.
    trial_id uuid,
    trial_at timestamptz,
    PRIMARY KEY (queue_id, kind),
    CONSTRAINT trial_has_a_time CHECK ((trial_id IS NULL) = (trial_at IS NULL))
);

-- A job that is set aside waits like one that waits for a slot of its group: it has no lease, and visible_at = 'infinity'.
-- It has no group, or keeps its slot, as a job does that waits for a retry: so the order of a group stays.
--   lease IS NULL, visible_at = 'infinity', run_at < 'infinity', group_key IS NULL or group_slot IS NOT NULL   set aside
ALTER TABLE windrow.job
    DROP CONSTRAINT waits_for_a_slot_or_for_nodes,
    ADD CONSTRAINT waits_without_a_lease CHECK (
        visible_at < 'infinity'
        OR lease IS NULL AND (run_at < 'infinity' OR workflow_node IS NOT NULL AND group_slot IS NULL)
    ) NOT VALID;

-- Jobs that are not set aside have no entry. In the order in which they are let through.
CREATE INDEX job_set_aside ON windrow.job (queue_id, kind, run_at, id)
    WHERE NOT isfinite(visible_at) AND isfinite(run_at) AND (group_key IS NULL OR group_slot IS NOT NULL);
