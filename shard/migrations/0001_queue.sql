-- The queue of one shard: live jobs, dead jobs, finished jobs, and the books that must balance (docs/concepts.md).

-- Who this database is. A DSN that points at another shard's database is refused before it does harm.
CREATE TABLE windrow.identity (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    cluster text COLLATE "C" NOT NULL,
    shard text COLLATE "C" NOT NULL
);

-- The slots whose enqueues this shard accepts. A router that believes otherwise is refused (I6). The epoch is the
-- catalog's; an older one never overwrites a newer one.
CREATE TABLE windrow.owned_slot (
    slot smallint PRIMARY KEY CHECK (slot BETWEEN 0 AND 16383),
    state text COLLATE "C" NOT NULL CHECK (state IN ('owned', 'draining')),
    epoch bigint NOT NULL
);

-- Names are interned: the hot index holds one bigint where it would hold two texts. Rows here are never deleted or
-- changed, so a router may remember them.
CREATE TABLE windrow.org (
    org_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    org text COLLATE "C" NOT NULL UNIQUE,
    slot smallint NOT NULL CHECK (slot BETWEEN 0 AND 16383)
);

CREATE TABLE windrow.queue_name (
    name_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue text COLLATE "C" NOT NULL UNIQUE
);

-- queue_id is (name_id, org_id) in one number, name first: all orgs' queues of one name stand side by side in the ready
-- index, so "which orgs have work for this name" is a loose index scan. The low 32 bits are the org.
CREATE TABLE windrow.queue (
    name_id integer NOT NULL REFERENCES windrow.queue_name,
    org_id integer NOT NULL REFERENCES windrow.org,
    queue_id bigint GENERATED ALWAYS AS (name_id::bigint << 32 | org_id) STORED PRIMARY KEY,
    -- Repeated from org and queue_name, so that one row proves a remembered queue_id right or wrong.
    org text COLLATE "C" NOT NULL,
    queue text COLLATE "C" NOT NULL,
    slot smallint NOT NULL,
    paused boolean NOT NULL DEFAULT false,
    -- NULL: the default of shard/retry.py.
    retry jsonb,
    max_attempts smallint CHECK (max_attempts BETWEEN 1 AND 1000),
    -- False once an operator deleted it; it is listed again as soon as it has jobs or a configuration.
    listed boolean NOT NULL DEFAULT true,
    created_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (org, queue)
);

-- Live jobs only: scheduled, ready and leased. The state is read from the row, never stored beside it:
--   lease IS NULL,     visible_at >  now()   scheduled
--   lease IS NULL,     visible_at <= now()   ready
--   lease IS NOT NULL, visible_at >  now()   leased
--   lease IS NOT NULL, visible_at <= now()   ready: the lease has ended, and nobody had to notice
CREATE TABLE windrow.job (
    id uuid NOT NULL,
    queue_id bigint NOT NULL,
    enqueued_at timestamptz NOT NULL DEFAULT now(),
    -- When it became or becomes due.
    run_at timestamptz NOT NULL,
    -- run_at, or the deadline of the lease.
    visible_at timestamptz NOT NULL,
    -- The token of the latest lease: random, so that a token lost with a failed-over transaction never fits again.
    lease bigint,
    leased_at timestamptz,
    expires_at timestamptz,
    priority smallint NOT NULL CHECK (priority BETWEEN 1 AND 9),
    attempt smallint NOT NULL DEFAULT 0 CHECK (attempt >= 0),
    -- NULL here, in retry: as the queue says.
    max_attempts smallint CHECK (max_attempts BETWEEN 1 AND 1000),
    kind text COLLATE "C" NOT NULL,
    payload bytea NOT NULL,
    attributes jsonb,
    retry jsonb,
    dedup_key text COLLATE "C",
    trace text COLLATE "C",
    worker text COLLATE "C",
    -- Attempts that ended without an ack, oldest first; NULL on the happy path, which so pays nothing.
    history jsonb,
    CONSTRAINT job_pkey PRIMARY KEY (id),
    CONSTRAINT leased_names_its_consumer CHECK (
        (lease IS NULL) = (leased_at IS NULL) AND (lease IS NULL) = (worker IS NULL)
    ),
    CONSTRAINT unleased_is_visible_when_due CHECK (lease IS NOT NULL OR visible_at = run_at),
    CONSTRAINT leased_has_an_attempt CHECK (lease IS NULL OR attempt >= 1)
) WITH (
    -- Every claim and ack leaves a dead row: clean up by count, not by share of a table that may be large or empty.
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000,
    autovacuum_vacuum_cost_delay = 0
);

-- What a claim walks, from a floor (shard/floor.py) up to now().
CREATE INDEX job_ready ON windrow.job (queue_id, priority, visible_at);

-- Out of attempts, or killed: kept aside until redriven, cancelled or expired.
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
    reason text NOT NULL,
    CONSTRAINT dead_pkey PRIMARY KEY (id)
);

CREATE INDEX dead_by_death ON windrow.dead (queue_id, finished_at, id);

-- Finished jobs, a partition for each UTC day (shard/partitions.py). A UUIDv7 carries its time, so that a lookup by id
-- needs only the days since.
CREATE TABLE windrow.finished (
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
    state text COLLATE "C" NOT NULL,
    kind text COLLATE "C" NOT NULL,
    payload bytea NOT NULL,
    attributes jsonb,
    retry jsonb,
    dedup_key text COLLATE "C",
    trace text COLLATE "C",
    worker text COLLATE "C",
    history jsonb,
    result bytea,
    reason text,
    CONSTRAINT succeeded_by_an_ack_or_cancelled_for_a_reason CHECK (
        state = 'succeeded' AND lease IS NOT NULL AND reason IS NULL
        OR state = 'cancelled' AND reason IS NOT NULL AND result IS NULL
    )
) PARTITION BY RANGE (finished_at);

CREATE INDEX finished_id ON windrow.finished (id);

-- The first job of each dedup key, for as long as its window lasts; outlives the job.
CREATE TABLE windrow.dedup (
    queue_id bigint NOT NULL,
    key text COLLATE "C" NOT NULL,
    job_id uuid NOT NULL,
    until timestamptz NOT NULL,
    PRIMARY KEY (queue_id, key)
);

-- How many jobs each org was ever granted, as a sum of rows: an enqueue appends one, and so never waits for another.
-- windrow check adds them up; the sweep folds them together.
CREATE TABLE windrow.tally (
    org_id integer NOT NULL,
    accepted bigint NOT NULL
);

-- Called by an enqueue after its insert, and VOLATILE on purpose: a volatile function looks with a fresh snapshot. The
-- enqueue's own snapshot may be older than the ack that moved the first copy of a job from `job` to `finished`; that ack
-- must have committed before the insert could succeed, so this look cannot miss it.
CREATE FUNCTION windrow.refuse_settled(ids uuid[], since timestamptz) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF EXISTS (SELECT FROM windrow.finished f WHERE f.id = ANY (ids) AND f.finished_at >= since)
        OR EXISTS (SELECT FROM windrow.dead d WHERE d.id = ANY (ids))
    THEN
        RAISE EXCEPTION 'a job of this batch has already finished or died' USING ERRCODE = 'WD001';
    END IF;
    RETURN false;
END
$$;

-- Same, for a batch of which something was not stored: an id that is a job of another org's fails the whole batch.
CREATE FUNCTION windrow.refuse_foreign(ids uuid[], queue_ids bigint[], since timestamptz) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF EXISTS (
        SELECT
        FROM unnest(ids, queue_ids) AS n (id, queue_id)
        CROSS JOIN LATERAL (
            SELECT j.queue_id FROM windrow.job j WHERE j.id = n.id
            UNION ALL
            SELECT d.queue_id FROM windrow.dead d WHERE d.id = n.id
            UNION ALL
            SELECT f.queue_id FROM windrow.finished f WHERE f.id = n.id AND f.finished_at >= since
        ) known
        WHERE known.queue_id & 4294967295 <> n.queue_id & 4294967295
    )
    THEN
        RAISE EXCEPTION 'an id of this batch is a job of another org' USING ERRCODE = 'WD002';
    END IF;
    RETURN false;
END
$$;

-- Appends one ended attempt to a job's history and keeps the newest 50. The lease is kept as text: JSON numbers are no
-- place for 64 bits.
CREATE FUNCTION windrow.remember(
    history jsonb, attempt smallint, worker text, leased_at timestamptz, ended_at timestamptz, outcome text, lease bigint, error text
) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN jsonb_array_length(longer.history) > 50 THEN longer.history - 0 ELSE longer.history END
    FROM (
        SELECT coalesce(history, '[]') || jsonb_build_array(jsonb_strip_nulls(jsonb_build_object(
            'attempt', attempt, 'worker', worker, 'outcome', outcome, 'lease', lease::text, 'error', error,
            'leased_at_us', (extract(epoch FROM leased_at) * 1000000)::bigint,
            'ended_at_us', (extract(epoch FROM ended_at) * 1000000)::bigint
        ))) AS history
    ) longer
$$;

-- How the attempt under this lease ended, by the history; NULL where the history does not know it.
CREATE FUNCTION windrow.outcome_of(history jsonb, lease bigint) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT entry ->> 'outcome' FROM jsonb_array_elements(history) entry WHERE entry ->> 'lease' = lease::text
$$;
