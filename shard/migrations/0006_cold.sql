-- Finished jobs lie by how long they are kept, and days that are over lie apart, in cold tables
-- (docs/decisions/0024-whole-days-turn-cold.md).

-- For how many days finished jobs are kept: as their queue says, or else their org. NULL: 30. Those of 0 are gone when their
-- day has turned cold. An org's word is copied into its queues, so that an ack asks one row; and few say anything.
ALTER TABLE windrow.org
    ADD COLUMN retention smallint CHECK (retention IN (0, 1, 7, 30, 90, 365, 2557)),
    -- Nothing of its history is dropped (legal hold).
    ADD COLUMN held boolean NOT NULL DEFAULT false;
CREATE INDEX org_policy ON windrow.org (org) WHERE retention IS NOT NULL OR held;
ALTER TABLE windrow.queue
    ADD COLUMN retention smallint CHECK (retention IN (0, 1, 7, 30, 90, 365, 2557)),
    ADD COLUMN org_retention smallint,
    ADD COLUMN kept smallint GENERATED ALWAYS AS (coalesce(retention, org_retention)) STORED;
CREATE INDEX queue_kept ON windrow.queue (queue_id) INCLUDE (kept) WHERE kept IS NOT NULL;

-- What each org is told is the catalog's to say, and copied to every shard (shard/policies.py). Versions grow with each change,
-- also after the catalog has been restored from a backup.
CREATE TABLE windrow.policy (
    org text COLLATE "C" PRIMARY KEY,
    retention smallint CHECK (retention IN (0, 1, 7, 30, 90, 365, 2557)),
    -- Legal hold; its reason is the operator's.
    held_since timestamptz,
    held_for text,
    CONSTRAINT says_something CHECK (retention IS NOT NULL OR held_since IS NOT NULL),
    CONSTRAINT held_for_a_reason CHECK ((held_since IS NULL) = (held_for IS NULL))
);
CREATE TABLE windrow.policies (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    -- The version of the latest change, on the catalog.
    changed bigint NOT NULL,
    -- That this shard has a copy of.
    copied bigint NOT NULL
);
INSERT INTO windrow.policies (changed, copied) VALUES (0, 0);

-- What finished so far is kept for 30 days. Releases before this one go on without the column.
ALTER TABLE windrow.finished ADD COLUMN retention smallint NOT NULL DEFAULT 30;
ALTER TABLE windrow.finished RENAME TO finished_30;
-- One that has the org too takes its place, and is built where jobs have finished before: for a million, about a second.
DROP INDEX windrow.finished_id;

-- Hot: the days that acks write to, by retention and UTC day. Cold: the days before.
CREATE TABLE windrow.finished (LIKE windrow.finished_30 INCLUDING DEFAULTS INCLUDING CONSTRAINTS) PARTITION BY LIST (retention);
-- By id, as new ones come; a list of a small org's newest goes through a day's without a look at the jobs of others.
CREATE INDEX finished_id ON windrow.finished (id, (queue_id & 4294967295));
CREATE TABLE windrow.cold (LIKE windrow.finished_30 INCLUDING CONSTRAINTS) PARTITION BY LIST (retention);
CREATE INDEX cold_id ON windrow.cold (id, (queue_id & 4294967295));
CREATE INDEX cold_org ON windrow.cold ((queue_id & 4294967295), id);

DO $$
DECLARE
    days smallint;
    day record;
BEGIN
    FOR day IN
        SELECT c.relname
        FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'windrow.finished_30'::regclass
    LOOP
        EXECUTE format('ALTER TABLE windrow.%I RENAME TO %I', day.relname, 'finished_30_' || right(day.relname, 8));
    END LOOP;
    ALTER TABLE windrow.finished ATTACH PARTITION windrow.finished_30 FOR VALUES IN (30);
    FOREACH days IN ARRAY ARRAY[0, 1, 7, 30, 90, 365, 2557] LOOP
        IF days <> 30 THEN
            EXECUTE format(
                'CREATE TABLE windrow.finished_%s PARTITION OF windrow.finished FOR VALUES IN (%s) PARTITION BY RANGE (finished_at)',
                days, days
            );
        END IF;
        EXECUTE format(
            'CREATE TABLE windrow.cold_%s PARTITION OF windrow.cold FOR VALUES IN (%s) PARTITION BY RANGE (finished_at)',
            days, days
        );
    END LOOP;
END
$$;

-- What has been kept for its time, of orgs that were held then. As a retention it is -1.
CREATE TABLE windrow.cold_held PARTITION OF windrow.cold FOR VALUES IN (-1);

-- All that is cold finished before `until`.
CREATE TABLE windrow.archive (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    until timestamptz NOT NULL
);
INSERT INTO windrow.archive (until) VALUES ('-infinity');

-- The books of cold days, written when a day turns cold: what a day holds need not be counted to be dropped.
CREATE TABLE windrow.archived (
    retention smallint NOT NULL,
    day date NOT NULL,
    org_id integer NOT NULL,
    jobs bigint NOT NULL,
    PRIMARY KEY (retention, day, org_id)
);
-- How many jobs of each org were kept for their time, and are gone.
CREATE TABLE windrow.expired (
    org_id integer PRIMARY KEY,
    jobs bigint NOT NULL
);
-- The ids of days that are gone sooner than an enqueue may be repeated (I3).
CREATE TABLE windrow.past_id (
    day date NOT NULL,
    id uuid NOT NULL,
    org_id integer NOT NULL
) PARTITION BY LIST (day);
CREATE INDEX past_id_id ON windrow.past_id (id);

-- Orgs of which everything is erased (shard/erasing.py), and how much that was; never who they were. While one is being
-- erased it goes by chr(127) and its number, and is in slot -1. One erasure has as many rows as there were orgs of the name.
CREATE TABLE windrow.erasure (
    id uuid NOT NULL,
    -- NULL: nothing is left.
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
ALTER TABLE windrow.org
    DROP CONSTRAINT org_slot_check, ADD CONSTRAINT org_slot_check CHECK (slot >= -1);

-- Jobs by id among the cold ones; none where ids are younger than all that is cold. Of this org; NULL: of whatever org. EXECUTE
-- plans anew, and so neither plans for nor locks the days before `since`.
CREATE FUNCTION windrow.find_cold(ids uuid[], since timestamptz, org bigint) RETURNS SETOF windrow.cold
LANGUAGE plpgsql STABLE AS $$
DECLARE
    rest timestamptz := since;
    found bigint;
BEGIN
    IF since >= (SELECT a.until FROM windrow.archive a) THEN
        RETURN;
    END IF;
    -- Most jobs finish on the day on which they were made, or the next: to plan for all days since would take longer than to
    -- look. An org has one job of an id.
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

-- Same, only whose they are; also for those that are gone.
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

-- The second look of an enqueue looks there too; in one statement, and so at one moment: no job slips through on its way.
CREATE OR REPLACE FUNCTION windrow.refuse_settled(ids uuid[], queue_ids bigint[], since timestamptz) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    -- By the ids alone; whose they are is asked of what is found, which is next to nothing.
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

-- What is past its time is found by these.
CREATE INDEX dedup_until ON windrow.dedup (until);
CREATE INDEX job_expires ON windrow.job (expires_at) WHERE expires_at IS NOT NULL;
