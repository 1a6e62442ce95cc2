-- LOCKS ACCESS EXCLUSIVE: cold, dead, departing, finished, job
-- Schedules: what stores jobs at instants of a calendar (docs/decisions/0050-schedules-are-fired-by-any-router.md).

-- Which run of a schedule stored the job, as JSON (shard/schedule.py). NULL: no schedule did. The hot table comes last: see
-- 0004_reports.sql.
ALTER TABLE windrow.cold ADD COLUMN scheduled_run text COLLATE "C";
ALTER TABLE windrow.finished ADD COLUMN scheduled_run text COLLATE "C";
ALTER TABLE windrow.departing ADD COLUMN scheduled_run text COLLATE "C";
ALTER TABLE windrow.dead ADD COLUMN scheduled_run text COLLATE "C";
ALTER TABLE windrow.job ADD COLUMN scheduled_run text COLLATE "C";

CREATE TABLE windrow.schedule (
    -- Made by a router. It stays the same when the org moves to another shard.
    id uuid PRIMARY KEY,
    -- No foreign key: orgs are deleted only by an erasure, after their schedules.
    org_id integer NOT NULL,
    name text COLLATE "C" NOT NULL,
    -- When it fires: exactly one of the three.
    cron text COLLATE "C",
    interval_us bigint CHECK (interval_us >= 1000000),
    once_at timestamptz,
    -- An IANA time zone, in which `cron` is read.
    zone text COLLATE "C" NOT NULL,
    -- No instant before the first, none at or after the second.
    starts_at timestamptz,
    ends_at timestamptz,
    jitter_us bigint NOT NULL CHECK (jitter_us >= 0),
    overlap text COLLATE "C" NOT NULL CHECK (overlap IN ('allow', 'skip', 'buffer_one', 'buffer_all', 'cancel_running')),
    catch_up text COLLATE "C" NOT NULL CHECK (catch_up IN ('latest', 'window', 'all')),
    catch_up_window_us bigint,
    note text NOT NULL,
    -- Who declared it in code; empty: nobody did.
    declared_by text COLLATE "C" NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    -- NULL: not paused.
    paused_at timestamptz,
    -- What the jobs are like.
    queue text COLLATE "C" NOT NULL,
    priority smallint CHECK (priority BETWEEN 1 AND 9),
    max_attempts smallint CHECK (max_attempts BETWEEN 1 AND 1000),
    kind text COLLATE "C" NOT NULL,
    payload bytea NOT NULL,
    attributes jsonb,
    retry jsonb,
    max_runtime_us bigint,
    group_key text COLLATE "C",
    -- The first instant that is not decided yet: neither stored nor skipped. NULL: none will come.
    next_at timestamptz,
    -- When a router must look at the schedule. NULL: not before it is changed.
    wake_at timestamptz,
    -- The instant of the latest run that was due by the calendar and was stored, and the job of the latest run of any
    -- cause.
    last_at timestamptz,
    last_job uuid,
    -- How many runs wait for an earlier one to end.
    buffered integer NOT NULL DEFAULT 0 CHECK (buffered >= 0),
    -- How many runs were decided.
    decided bigint NOT NULL DEFAULT 0,
    UNIQUE (org_id, name),
    CONSTRAINT one_timing CHECK (num_nonnulls(cron, interval_us, once_at) = 1),
    CONSTRAINT window_if_it_counts CHECK ((catch_up = 'window') = (catch_up_window_us IS NOT NULL)),
    CONSTRAINT paused_sleeps CHECK (paused_at IS NULL OR wake_at IS NULL)
) WITH (
    -- Every firing leaves a dead row.
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0
);
-- The probe of the routers reads the first entry. Schedules that sleep have none.
CREATE INDEX schedule_wake ON windrow.schedule (wake_at) WHERE wake_at IS NOT NULL;

-- The newest runs of each schedule, and what was skipped. A run is one row for ever, whoever tries to store it again (I10).
CREATE TABLE windrow.schedule_run (
    schedule_id uuid NOT NULL,
    -- The nominal instant: what the calendar says, without jitter and delay.
    at timestamptz NOT NULL,
    -- If all instants from `at` on were skipped together: the last of them.
    through timestamptz,
    cause text COLLATE "C" NOT NULL CHECK (cause IN ('schedule', 'catch_up', 'trigger', 'backfill')),
    outcome text COLLATE "C" NOT NULL CHECK (outcome IN ('stored', 'buffered', 'skipped')),
    skipped_for text COLLATE "C" CHECK (skipped_for IN ('overlap', 'catch_up', 'pause')),
    job_id uuid,
    decided_at timestamptz NOT NULL DEFAULT now(),
    -- Names a call of TriggerSchedule, so that a repeated one stores nothing.
    request uuid,
    PRIMARY KEY (schedule_id, at),
    CONSTRAINT skipped_for_a_reason CHECK ((outcome = 'skipped') = (skipped_for IS NOT NULL)),
    CONSTRAINT stored_as_a_job CHECK ((outcome = 'stored') = (job_id IS NOT NULL)),
    CONSTRAINT only_skips_have_an_extent CHECK (through IS NULL OR outcome = 'skipped')
) WITH (
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0
);
