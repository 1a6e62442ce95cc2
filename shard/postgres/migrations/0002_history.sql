-- LOCKS SHARE ROW EXCLUSIVE: org
-- Finished jobs (docs/decisions/0024-whole-days-turn-cold.md). `finished` has the days to which acks write, `cold` the
-- days before. Both have a partition for each retention and UTC day, so that a day whose retention is over is dropped
-- without reading its rows. The days of `finished` are made ahead of time (shard/postgres/partitions.py).

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
    -- For how many days the job is kept: what counted for its queue when the job finished.
    retention smallint NOT NULL,
    CONSTRAINT succeeded_by_an_ack_or_cancelled_for_a_reason CHECK (
        state = 'succeeded' AND lease IS NOT NULL AND reason IS NULL
        OR state = 'cancelled' AND reason IS NOT NULL AND result IS NULL
    )
) PARTITION BY LIST (retention);
-- By id, because new ids are appended. With the org, a list of a small org's newest jobs need not read the jobs of
-- others.
CREATE INDEX finished_id ON windrow.finished (id, (queue_id & 4294967295));

CREATE TABLE windrow.cold (LIKE windrow.finished INCLUDING CONSTRAINTS) PARTITION BY LIST (retention);
CREATE INDEX cold_id ON windrow.cold (id, (queue_id & 4294967295));
CREATE INDEX cold_org ON windrow.cold ((queue_id & 4294967295), id);

DO $$
DECLARE
    days smallint;
    finished_or_cold text;
BEGIN
    FOREACH days IN ARRAY ARRAY[0, 1, 7, 30, 90, 365, 2557] LOOP
        FOREACH finished_or_cold IN ARRAY ARRAY['finished', 'cold'] LOOP
            EXECUTE format(
                'CREATE TABLE windrow.%1$s_%2$s PARTITION OF windrow.%1$s FOR VALUES IN (%2$s) PARTITION BY RANGE (finished_at)',
                finished_or_cold, days
            );
        END LOOP;
    END LOOP;
END
$$;
-- Jobs past their retention, of orgs that were under legal hold then. Their retention is -1.
CREATE TABLE windrow.cold_held PARTITION OF windrow.cold FOR VALUES IN (-1);

-- All cold jobs finished before `until`.
CREATE TABLE windrow.archive (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    until timestamptz NOT NULL
);
INSERT INTO windrow.archive (until) VALUES ('-infinity');

-- The number of jobs in each cold day, written when the day turns cold, so that a day can be dropped without counting.
CREATE TABLE windrow.archived (
    retention smallint NOT NULL,
    day date NOT NULL,
    org_id integer NOT NULL,
    jobs bigint NOT NULL,
    PRIMARY KEY (retention, day, org_id)
);
-- How many jobs of each org were deleted after their retention.
CREATE TABLE windrow.expired (
    org_id integer PRIMARY KEY,
    jobs bigint NOT NULL
);
-- The ids of deleted days, while an enqueue with them may still be repeated (I3).
CREATE TABLE windrow.past_id (
    day date NOT NULL,
    id uuid NOT NULL,
    org_id integer NOT NULL
) PARTITION BY LIST (day);
CREATE INDEX past_id_id ON windrow.past_id (id);

-- Erasures of orgs (shard/history/erasure.py), and how much was erased; never the names of the orgs. While an org is
-- being erased, its name is chr(127) and its number, and its slot is -1. An erasure has a row for each org that had the
-- name.
CREATE TABLE windrow.erasure (
    id uuid NOT NULL,
    -- NULL: nothing of the org is left.
    org_id integer UNIQUE REFERENCES windrow.org,
    begun_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz,
    live bigint NOT NULL DEFAULT 0,
    dead bigint NOT NULL DEFAULT 0,
    finished bigint NOT NULL DEFAULT 0,
    cold bigint NOT NULL DEFAULT 0,
    dedup_keys bigint NOT NULL DEFAULT 0,
    past_ids bigint NOT NULL DEFAULT 0,
    CONSTRAINT ended_when_nothing_is_left CHECK ((ended_at IS NULL) = (org_id IS NOT NULL))
);
CREATE INDEX erasure_id ON windrow.erasure (id);

-- ── Lookups of jobs that are no longer live ──────────────────────────────────────────────────────────────────────────

-- Returns cold jobs by id; none if `since` is after all cold days. Only jobs of this org; NULL: of any org. EXECUTE
-- plans for each call, so that the days before `since` are neither planned for nor locked.
CREATE FUNCTION windrow.find_cold(ids uuid[], since timestamptz, org bigint) RETURNS SETOF windrow.cold
LANGUAGE plpgsql STABLE AS $$
DECLARE
    rest timestamptz := since;
    found bigint;
BEGIN
    IF since >= (SELECT a.until FROM windrow.archive a) THEN
        RETURN;
    END IF;
    -- Most jobs finish on the day on which they were made, or the next. Planning for all days since then would take
    -- longer than the lookup itself. An org has only one job with an id, so the lookup ends once all ids are found.
    IF org IS NOT NULL THEN
        rest := since + interval '1 day';
        RETURN QUERY EXECUTE
            'SELECT c.* FROM windrow.cold c '
            'WHERE c.id = ANY ($1) AND c.queue_id & 4294967295 = $4 AND c.finished_at >= $2 AND c.finished_at < $3'
            USING ids, since, rest, org;
        GET DIAGNOSTICS found = ROW_COUNT;
        IF found = cardinality(ids) THEN
            RETURN;
        END IF;
    END IF;
    RETURN QUERY EXECUTE
        'SELECT c.* FROM windrow.cold c '
        'WHERE c.id = ANY ($1) AND ($3 IS NULL OR c.queue_id & 4294967295 = $3) AND c.finished_at >= $2'
        USING ids, rest, org;
END
$$;

-- Returns the ids and orgs of cold jobs, also of deleted ones whose ids are still known (past_id).
CREATE FUNCTION windrow.known_cold(ids uuid[], since timestamptz) RETURNS TABLE (id uuid, org_id bigint)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF since < (SELECT a.until FROM windrow.archive a) THEN
        RETURN QUERY EXECUTE
            'SELECT c.id, c.queue_id & 4294967295 FROM windrow.cold c WHERE c.id = ANY ($1) AND c.finished_at >= $2'
            USING ids, since;
        RETURN QUERY SELECT p.id, p.org_id::bigint FROM windrow.past_id p WHERE p.id = ANY (ids);
    END IF;
END
$$;

-- An enqueue calls this after its insert. It is VOLATILE so that it reads with a new snapshot. The enqueue's own
-- snapshot may be older than the ack that moved an earlier job with the same id from `job` to `finished`. That ack must
-- have committed before the insert could succeed, so this lookup finds the job. It is one statement with one snapshot,
-- so that it cannot miss a job that moves between the tables. It does not read `departing`, because a slot whose jobs
-- depart accepts no jobs.
CREATE FUNCTION windrow.refuse_settled(ids uuid[], queue_ids bigint[], since timestamptz) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    -- Finds jobs by id alone, and compares orgs afterwards: almost no jobs are found.
    IF EXISTS (
        SELECT
        FROM (
            SELECT f.id, f.queue_id & 4294967295 AS org_id
            FROM windrow.finished f
            WHERE f.id = ANY (ids) AND f.finished_at >= since
            UNION ALL
            SELECT d.id, d.queue_id & 4294967295 FROM windrow.dead d WHERE d.id = ANY (ids)
            UNION ALL
            SELECT c.id, c.org_id FROM windrow.known_cold(ids, since) c
        ) known
        WHERE known.org_id = ANY (ARRAY(
            SELECT n.queue_id & 4294967295 FROM unnest(ids, queue_ids) AS n (id, queue_id) WHERE n.id = known.id
        ))
    )
    THEN
        RAISE EXCEPTION 'a job of this batch has already finished or died' USING ERRCODE = 'WD001';
    END IF;
    RETURN false;
END
$$;

-- Called after stray dead jobs were stored (bring_home.sql), for the same reason as refuse_settled: it reads with a new
-- snapshot, and fails if one of the jobs is live or finished.
CREATE FUNCTION windrow.refuse_revived(ids uuid[], queue_ids bigint[], since timestamptz) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF EXISTS (
        SELECT
        FROM (
            SELECT j.id, j.queue_id & 4294967295 AS org_id FROM windrow.job j WHERE j.id = ANY (ids)
            UNION ALL
            SELECT f.id, f.queue_id & 4294967295
            FROM windrow.finished f
            WHERE f.id = ANY (ids) AND f.finished_at >= since
            UNION ALL
            SELECT c.id, c.org_id FROM windrow.known_cold(ids, since) c
        ) known
        WHERE known.org_id = ANY (ARRAY(
            SELECT n.queue_id & 4294967295 FROM unnest(ids, queue_ids) AS n (id, queue_id) WHERE n.id = known.id
        ))
    )
    THEN
        RAISE EXCEPTION 'a job of this batch has already finished or lives' USING ERRCODE = 'WD001';
    END IF;
    RETURN false;
END
$$;
