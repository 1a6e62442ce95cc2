-- Jobs, from their enqueue to their end: the queues they stand in, their leases, and the dedup keys. Where finished jobs
-- go is in 0002_history.sql.

-- Live jobs only: scheduled, ready and leased. The state is read from the row, never stored beside it:
--   lease IS NULL,     visible_at >  now()   scheduled
--   lease IS NULL,     visible_at <= now()   ready
--   lease IS NOT NULL, visible_at >  now()   leased
--   lease IS NOT NULL, visible_at <= now()   ready: the lease has expired, without any write
CREATE TABLE windrow.job (
    -- A UUIDv7, made by the producer: it contains the time when the job was made.
    id uuid NOT NULL,
    -- queue.queue_id. No foreign key: it would cost a lookup for each job, and queues are never deleted while they have
    -- jobs.
    queue_id bigint NOT NULL,
    enqueued_at timestamptz NOT NULL DEFAULT now(),
    -- When the job became or becomes due.
    run_at timestamptz NOT NULL,
    -- run_at, or the end of the lease.
    visible_at timestamptz NOT NULL,
    -- The number of the latest lease. It is random, so that a lease that was lost in a failover never matches a later
    -- one.
    lease bigint,
    leased_at timestamptz,
    -- If the job is not leased by then, it is cancelled.
    expires_at timestamptz,
    -- 1 is claimed first.
    priority smallint NOT NULL CHECK (priority BETWEEN 1 AND 9),
    -- How many leases of the job count as attempts, the present one included.
    attempt smallint NOT NULL DEFAULT 0 CHECK (attempt >= 0),
    -- NULL in max_attempts or retry: the queue's setting.
    max_attempts smallint CHECK (max_attempts BETWEEN 1 AND 1000),
    kind text COLLATE "C" NOT NULL,
    payload bytea NOT NULL,
    attributes jsonb,
    retry jsonb,
    dedup_key text COLLATE "C",
    -- The producer's trace context (W3C traceparent).
    trace text COLLATE "C",
    -- The consumer that has the latest lease.
    worker text COLLATE "C",
    -- Attempts that ended without an ack, oldest first. NULL if there are none, so that most jobs store nothing here.
    history jsonb,
    CONSTRAINT leased_names_its_consumer CHECK (
        (lease IS NULL) = (leased_at IS NULL) AND (lease IS NULL) = (worker IS NULL)
    ),
    CONSTRAINT unleased_is_visible_when_due CHECK (lease IS NOT NULL OR visible_at = run_at),
    CONSTRAINT leased_has_an_attempt CHECK (lease IS NULL OR attempt >= 1)
) WITH (
    -- Every claim and ack leaves a dead row. Vacuum by the number of dead rows, not by their share of a table that may
    -- be large or empty.
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000,
    autovacuum_vacuum_cost_delay = 0
);

-- Two orgs may use the same id. The low 32 bits of queue_id are the org.
CREATE UNIQUE INDEX job_id ON windrow.job (id, (queue_id & 4294967295));
-- A claim scans this index from a floor (shard/queue/claim_floor.py) up to now().
CREATE INDEX job_ready ON windrow.job (queue_id, priority, visible_at);
CREATE INDEX job_expires ON windrow.job (expires_at) WHERE expires_at IS NOT NULL;

-- Jobs that are out of attempts, or failed permanently. They stay here until they are redriven, cancelled or expired.
CREATE TABLE windrow.dead (
    id uuid NOT NULL,
    queue_id bigint NOT NULL,
    enqueued_at timestamptz NOT NULL,
    run_at timestamptz NOT NULL,
    finished_at timestamptz NOT NULL DEFAULT now(),
    lease bigint,
    leased_at timestamptz,
    expires_at timestamptz,
    priority smallint NOT NULL,
    attempt smallint NOT NULL,
    max_attempts smallint,
    kind text COLLATE "C" NOT NULL,
    payload bytea NOT NULL,
    attributes jsonb,
    retry jsonb,
    dedup_key text COLLATE "C",
    trace text COLLATE "C",
    worker text COLLATE "C",
    history jsonb,
    reason text NOT NULL
);

CREATE UNIQUE INDEX dead_id ON windrow.dead (id, (queue_id & 4294967295));
-- Lists, redrives and purges read a queue's dead jobs by the time of their death.
CREATE INDEX dead_by_death ON windrow.dead (queue_id, finished_at, id);

-- Jobs on their way to another shard (docs/decisions/0017-moving-slots.md). Only lookups by id see them. `finished_at`
-- and `reason` are NULL for a job that is not dead. Such a job has no lease, and is visible at its run_at. A row is sent
-- as text, as Postgres writes it; a shard whose table has other columns refuses it.
CREATE TABLE windrow.departing (
    slot smallint NOT NULL,
    epoch bigint NOT NULL,
    chunk integer NOT NULL,
    LIKE windrow.dead,
    CONSTRAINT dead_at_a_time_for_a_reason CHECK ((finished_at IS NULL) = (reason IS NULL)),
    CONSTRAINT only_the_dead_keep_a_lease CHECK (reason IS NOT NULL OR lease IS NULL)
) WITH (
    -- Every row is deleted soon: vacuum by the number of dead rows.
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0
);
ALTER TABLE windrow.departing ALTER COLUMN finished_at DROP NOT NULL, ALTER COLUMN reason DROP NOT NULL;

CREATE INDEX departing_id ON windrow.departing (id);
CREATE INDEX departing_slot ON windrow.departing (slot);

-- Names are interned: the hot index holds one bigint instead of two texts. A row's names and numbers never change, so
-- routers may remember them. Only the erasure of an org deletes rows.
CREATE TABLE windrow.org (
    org_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    org text COLLATE "C" NOT NULL UNIQUE,
    -- A hash slot, or from 16,384 on the slot of a pinned org; −1 while the org is being erased.
    slot smallint NOT NULL CHECK (slot >= -1),
    -- Copied from the catalog's policies (0003_placement.sql). Retention in days; NULL: the default.
    retention smallint CHECK (retention IN (0, 1, 7, 30, 90, 365, 2557)),
    -- Legal hold: nothing of the org's history is deleted.
    held boolean NOT NULL DEFAULT false
);

CREATE INDEX org_slot ON windrow.org (slot);
CREATE INDEX org_policy ON windrow.org (org) WHERE retention IS NOT NULL OR held;

CREATE TABLE windrow.queue_name (
    name_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue text COLLATE "C" NOT NULL UNIQUE
);

-- queue_id contains name_id and org_id in one number, the name first. All orgs' queues of one name are therefore
-- adjacent in the ready index, and a loose index scan finds the orgs that have jobs for a name. The low 32 bits are the
-- org.
CREATE TABLE windrow.queue (
    name_id integer NOT NULL REFERENCES windrow.queue_name,
    org_id integer NOT NULL REFERENCES windrow.org,
    queue_id bigint GENERATED ALWAYS AS (name_id::bigint << 32 | org_id) STORED PRIMARY KEY,
    -- Copied from org and queue_name, so that one row shows whether a remembered queue_id is right.
    org text COLLATE "C" NOT NULL,
    queue text COLLATE "C" NOT NULL,
    slot smallint NOT NULL,
    paused boolean NOT NULL DEFAULT false,
    -- NULL: the default of shard/retry_policy.py.
    retry jsonb,
    max_attempts smallint CHECK (max_attempts BETWEEN 1 AND 1000),
    -- False after an operator deleted the queue. It is listed again as soon as it has jobs or a configuration.
    listed boolean NOT NULL DEFAULT true,
    created_at timestamptz NOT NULL DEFAULT now(),
    -- For how many days finished jobs are kept; NULL: as the org says. The org's retention is copied to here, so that an
    -- ack reads one row. With 0, jobs are deleted when their day turns cold.
    retention smallint CHECK (retention IN (0, 1, 7, 30, 90, 365, 2557)),
    org_retention smallint,
    -- The retention that counts; NULL: the default.
    kept smallint GENERATED ALWAYS AS (coalesce(retention, org_retention)) STORED,
    UNIQUE (org, queue)
);

-- Few queues have a retention, so an ack finds out from this small index that its queue has none.
CREATE INDEX queue_kept ON windrow.queue (queue_id) INCLUDE (kept) WHERE kept IS NOT NULL;

-- The first job of each dedup key, until the key's window ends. A row may outlive its job.
CREATE TABLE windrow.dedup (
    queue_id bigint NOT NULL,
    key text COLLATE "C" NOT NULL,
    job_id uuid NOT NULL,
    until timestamptz NOT NULL,
    PRIMARY KEY (queue_id, key)
);

-- Finds the keys whose window has ended.
CREATE INDEX dedup_until ON windrow.dedup (until);

-- How many jobs of each org were ever accepted, as a sum of rows: every enqueue adds a row, so no enqueue waits for
-- another. `windrow check` adds the rows up; the sweep folds them into one row for each org.
CREATE TABLE windrow.tally (
    org_id integer NOT NULL,
    accepted bigint NOT NULL
);

-- Returns the numbers of orgs, in the order of the given names; NULL where there is no such org. Statements about
-- leases of several orgs use it: for each lease they get the position in this list of the org that must own it (I4).
CREATE FUNCTION windrow.org_ids(orgs text[]) RETURNS integer[]
LANGUAGE sql STABLE AS $$
    SELECT array_agg((SELECT o.org_id FROM windrow.org o WHERE o.org = n.org) ORDER BY n.position)
    FROM unnest(orgs) WITH ORDINALITY AS n (org, position)
$$;

-- Appends one ended attempt to a job's history and keeps the newest 50. `failure` is an object with type, message, stack
-- and permanent, each only if it is not empty. The newest 5 attempts keep their stacks: with all stacks, an answer with
-- this job could exceed 4 MiB. The lease is stored as text, because JSON numbers cannot hold 64 bits safely.
CREATE FUNCTION windrow.remember(
    history jsonb, attempt smallint, worker text, leased_at timestamptz, ended_at timestamptz, outcome text, lease bigint,
    failure jsonb
) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN jsonb_array_length(longer.history) > 50 THEN longer.history - 0 ELSE longer.history END
        #- '{-6,failure,stack}'
    FROM (
        SELECT coalesce(history, '[]') || jsonb_build_array(jsonb_strip_nulls(jsonb_build_object(
            'attempt', attempt, 'worker', worker, 'outcome', outcome, 'lease', lease::text, 'failure', failure,
            'leased_at_us', (extract(epoch FROM leased_at) * 1000000)::bigint,
            'ended_at_us', (extract(epoch FROM ended_at) * 1000000)::bigint
        ))) AS history
    ) longer
$$;

-- Returns how the attempt with this lease ended, by the history; NULL if the history does not contain it.
CREATE FUNCTION windrow.outcome_of(history jsonb, lease bigint) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT entry ->> 'outcome' FROM jsonb_array_elements(history) entry WHERE entry ->> 'lease' = lease::text
$$;

-- Rolls back an enqueue that took a dedup key for a job and then did not store the job, because a live job has its id:
-- a job that is not stored must leave no key. The error code is that of refuse_settled (0002_history.sql): the caller
-- looks up the known jobs and tries again with the others. VOLATILE, so that the planner does not call it.
CREATE FUNCTION windrow.refuse_unstored_keys() RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RAISE EXCEPTION 'a job of this batch is live already, and its dedup key is free' USING ERRCODE = 'WD001';
END
$$;
