-- Concurrency per group key (docs/decisions/0047-a-slot-of-a-group-is-a-column-of-the-job.md): at most k jobs of one
-- queue and group are leased at a time. The hot table comes last: see 0004_reports.sql.
ALTER TABLE windrow.cold ADD COLUMN group_key text COLLATE "C";
ALTER TABLE windrow.finished ADD COLUMN group_key text COLLATE "C";
-- A job with a group slot keeps it on its way to another shard.
ALTER TABLE windrow.departing ADD COLUMN group_key text COLLATE "C", ADD COLUMN group_slot smallint;
ALTER TABLE windrow.dead ADD COLUMN group_key text COLLATE "C";

-- How many jobs of one group may be leased at a time (k). NULL: 1.
ALTER TABLE windrow.queue ADD COLUMN group_concurrency smallint CHECK (group_concurrency BETWEEN 1 AND 1000);

-- True from the beginning of a move to this shard until the source has no job of the slot left. Until then no group slot
-- is given here: the source has jobs that are leased, or that come first.
ALTER TABLE windrow.owned_slot ADD COLUMN arriving boolean NOT NULL DEFAULT false;

-- A live job that waits has no lease, and visible_at = 'infinity': no claim, probe or sweep sees it. Today a job waits for
-- a group slot only. `run_at` is when it became due.
--   lease IS NULL, visible_at = 'infinity'   ready, and waits
ALTER TABLE windrow.job
    ADD COLUMN group_key text COLLATE "C",
    -- 1 to k; NULL: the job waits for a slot, or is scheduled and was never due, or has no group. The job keeps its slot
    -- through leases, retries and snoozes, until the row is deleted.
    ADD COLUMN group_slot smallint CHECK (group_slot BETWEEN 1 AND 1000),
    DROP CONSTRAINT unleased_is_visible_when_due,
    -- A job that got a slot late is visible from then on. NOT VALID: all rows that are there satisfy these conditions, by
    -- the dropped constraint or because they have no group.
    ADD CONSTRAINT unleased_is_visible_when_due CHECK (
        lease IS NOT NULL OR visible_at = run_at OR visible_at > run_at AND group_key IS NOT NULL
    ) NOT VALID,
    ADD CONSTRAINT waits_for_a_slot CHECK (
        visible_at < 'infinity' OR lease IS NULL AND group_key IS NOT NULL AND group_slot IS NULL
    ) NOT VALID,
    ADD CONSTRAINT slot_of_a_group CHECK (group_slot IS NULL OR group_key IS NOT NULL) NOT VALID,
    ADD CONSTRAINT leased_of_a_group_has_a_slot CHECK (lease IS NULL OR group_key IS NULL OR group_slot IS NOT NULL)
        NOT VALID;

-- Jobs without a group have no entry in these. The first is the semaphore: one job for each slot.
CREATE UNIQUE INDEX job_group_slot ON windrow.job (queue_id, group_key, group_slot) WHERE group_slot IS NOT NULL;
-- The jobs of a group that wait for a slot, in the order in which they get one.
CREATE INDEX job_group_waits ON windrow.job (queue_id, group_key, run_at, id)
    WHERE group_key IS NOT NULL AND group_slot IS NULL AND visible_at = 'infinity';

-- ── Triggers ─────────────────────────────────────────────────────────────────────────────────────────────────────────

-- Every statement that stores or ends jobs of a group, or makes one wait, is followed by the filling of the group's free
-- slots in the same transaction. Triggers do that, and not further statements, so that no statement can forget it, and a
-- call costs no further round trip. A job without a group costs the evaluation of a WHEN. There is no BEFORE trigger of
-- updates and deletes: it would lock every row once more.

CREATE FUNCTION windrow.group_bucket(of_queue bigint, of_group text) RETURNS integer
LANGUAGE sql IMMUTABLE AS $$ SELECT (hashtextextended(of_group, of_queue) & 1023)::integer $$;

-- Gives free slots of a group to the first jobs that wait. `freed`: the only slot that can be free; NULL: any. The caller
-- holds the lock of the group's bucket, and took it in an earlier statement: so each statement here sees what the holders
-- before it have committed.
CREATE FUNCTION windrow.fill_group(of_queue bigint, of_group text, freed smallint) RETURNS integer
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    slots_max smallint;
    free smallint;
    filled integer := 0;
BEGIN
    -- While the queue's slot moves, neither shard gives group slots. So a group has at most k slots on both together.
    SELECT coalesce(q.group_concurrency, 1) INTO slots_max
    FROM windrow.queue q
    JOIN windrow.owned_slot s ON s.slot = q.slot
    WHERE q.queue_id = of_queue AND s.state = 'owned' AND NOT s.arriving;
    IF slots_max IS NULL OR freed > slots_max THEN
        RETURN 0;
    END IF;
    FOR free IN
        SELECT n.slot::smallint
        FROM generate_series(coalesce(freed, 1), coalesce(freed, slots_max)) AS n (slot)
        WHERE NOT EXISTS (
            SELECT FROM windrow.job j
            WHERE j.queue_id = of_queue AND j.group_key = of_group AND j.group_slot = n.slot::smallint
        )
    LOOP
        -- If another session has locked the first job, do not wait: it may wait for this bucket. It ends or changes that
        -- job, and then fills the group itself. Never take the second job instead: that would break the order.
        UPDATE windrow.job j
        -- Never before now(): claims do not look below the floor.
        SET group_slot = free, visible_at = greatest(j.run_at, clock_timestamp())
        WHERE j.ctid = (
            SELECT f.ctid
            FROM windrow.job f
            WHERE f.ctid = (
                SELECT w.ctid
                FROM windrow.job w
                WHERE w.queue_id = of_queue AND w.group_key = of_group AND w.group_slot IS NULL
                    AND w.visible_at = 'infinity'
                ORDER BY w.run_at, w.id
                LIMIT 1
            ) AND f.visible_at = 'infinity' AND f.group_slot IS NULL
            FOR UPDATE SKIP LOCKED
        );
        EXIT WHEN NOT FOUND;
        filled := filled + 1;
    END LOOP;
    RETURN filled;
END
$$;

-- Locks buckets of groups until the end of the transaction. All sessions lock them in ascending order, once in a
-- transaction, so that they cannot deadlock. Buckets, because a lock for each group could fill the table of locks.
CREATE FUNCTION windrow.lock_group_buckets(buckets integer[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(14, b.bucket)
    FROM (SELECT DISTINCT n.bucket FROM unnest(buckets) AS n (bucket) ORDER BY n.bucket) b;
END
$$;

-- Fills several groups, for a sweep. Returns how many jobs got slots.
CREATE FUNCTION windrow.fill_groups(queues bigint[], groups text[]) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    filled bigint;
BEGIN
    PERFORM windrow.lock_group_buckets(array_agg(windrow.group_bucket(n.queue_id, n.group_key)))
    FROM unnest(queues, groups) AS n (queue_id, group_key);
    SELECT sum(windrow.fill_group(n.queue_id, n.group_key, NULL)) INTO filled
    FROM unnest(queues, groups) AS n (queue_id, group_key);
    RETURN filled;
END
$$;

CREATE FUNCTION windrow.wait_for_slot() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    NEW.visible_at := 'infinity';
    RETURN NEW;
END
$$;

-- Notes the bucket of a group whose jobs this transaction has changed. The setting ends with the transaction.
CREATE FUNCTION windrow.note_group() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    changed windrow.job := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
BEGIN
    PERFORM set_config(
        'windrow.group_buckets',
        concat_ws(
            ',', nullif(current_setting('windrow.group_buckets', true), ''),
            windrow.group_bucket(changed.queue_id, changed.group_key)
        ),
        true
    );
    RETURN NULL;
END
$$;

-- Runs when the transaction commits, for each row. The first run locks the buckets of all noted groups.
CREATE FUNCTION windrow.fill_noted_group() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    noted text := current_setting('windrow.group_buckets', true);
BEGIN
    IF noted <> '' THEN
        PERFORM windrow.lock_group_buckets(string_to_array(noted, ',')::integer[]);
        PERFORM set_config('windrow.group_buckets', '', true);
    END IF;
    IF TG_OP = 'DELETE' THEN
        -- A job that waited may have been locked here when another session wanted to give it a slot.
        PERFORM windrow.fill_group(OLD.queue_id, OLD.group_key, OLD.group_slot);
    ELSE
        PERFORM windrow.fill_group(NEW.queue_id, NEW.group_key, NULL);
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER group_waits BEFORE INSERT ON windrow.job FOR EACH ROW
    WHEN (NEW.group_key IS NOT NULL AND NEW.group_slot IS NULL AND NEW.lease IS NULL AND NEW.visible_at <= now())
    EXECUTE FUNCTION windrow.wait_for_slot();

CREATE TRIGGER group_note_insert AFTER INSERT ON windrow.job FOR EACH ROW
    WHEN (NEW.group_key IS NOT NULL AND NEW.visible_at = 'infinity')
    EXECUTE FUNCTION windrow.note_group();
CREATE CONSTRAINT TRIGGER group_fill_insert AFTER INSERT ON windrow.job DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (NEW.group_key IS NOT NULL AND NEW.visible_at = 'infinity')
    EXECUTE FUNCTION windrow.fill_noted_group();

CREATE TRIGGER group_note_delete AFTER DELETE ON windrow.job FOR EACH ROW
    WHEN (OLD.group_key IS NOT NULL AND (OLD.group_slot IS NOT NULL OR OLD.visible_at = 'infinity'))
    EXECUTE FUNCTION windrow.note_group();
CREATE CONSTRAINT TRIGGER group_fill_delete AFTER DELETE ON windrow.job DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (OLD.group_key IS NOT NULL AND (OLD.group_slot IS NOT NULL OR OLD.visible_at = 'infinity'))
    EXECUTE FUNCTION windrow.fill_noted_group();

-- A job that gave its slot up, began to wait, or was changed while it waited.
CREATE TRIGGER group_note_update AFTER UPDATE ON windrow.job FOR EACH ROW
    WHEN (
        NEW.group_key IS NOT NULL AND NEW.group_slot IS NULL
        AND (OLD.group_slot IS NOT NULL OR NEW.visible_at = 'infinity' OR OLD.visible_at = 'infinity')
    )
    EXECUTE FUNCTION windrow.note_group();
CREATE CONSTRAINT TRIGGER group_fill_update AFTER UPDATE ON windrow.job DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (
        NEW.group_key IS NOT NULL AND NEW.group_slot IS NULL
        AND (OLD.group_slot IS NOT NULL OR NEW.visible_at = 'infinity' OR OLD.visible_at = 'infinity')
    )
    EXECUTE FUNCTION windrow.fill_noted_group();
