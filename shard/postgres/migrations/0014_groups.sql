-- LOCKS ACCESS EXCLUSIVE: cold, dead, departing, finished, job, owned_slot, queue
-- READS: job, queue
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
-- A job whose run_at is 'infinity' too waits for nodes of its workflow instead (0019_workflows.sql), and for no slot yet.
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
-- The jobs of a group that wait for a slot, in the order in which they get one. isfinite, because job_ready does not serve
-- it: a plan that was made for an empty table must not scan all jobs of a queue that wait.
CREATE INDEX job_group_waits ON windrow.job (queue_id, group_key, run_at, id)
    WHERE group_key IS NOT NULL AND group_slot IS NULL AND NOT isfinite(visible_at) AND isfinite(run_at);

-- ── Triggers ─────────────────────────────────────────────────────────────────────────────────────────────────────────

-- Every statement that ends jobs of a group, or makes one wait, is followed by the filling of the group's free slots in
-- the same transaction. Triggers do that, and not further statements, so that no statement can forget it, and a call
-- costs no further round trip. A job without a group costs the evaluation of a WHEN. There is no BEFORE trigger of
-- updates and deletes: it would lock every row once more.

-- Locks the buckets of groups until the end of the transaction. A transaction locks buckets once, in ascending order, so
-- that two cannot deadlock. Buckets, because a lock for each group could fill the table of locks. Statements that begin
-- after it see what the holders before it have committed.
CREATE FUNCTION windrow.lock_group_buckets(queues bigint[], groups text[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(14, b.bucket)
    FROM (
        SELECT DISTINCT (hashtextextended(n.group_key, n.queue_id) & 1023)::integer AS bucket
        FROM unnest(queues, groups) AS n (queue_id, group_key)
        WHERE n.group_key IS NOT NULL
        ORDER BY bucket
    ) b;
END
$$;

-- OFFSET 0 in an EXISTS fences: one lookup for each group, never a join with all jobs that wait.

-- Gives the free slots of groups to the first jobs that wait. The caller holds the locks of their buckets, and took them
-- in an earlier statement. Returns how many jobs got slots.
CREATE FUNCTION windrow.fill_group_slots(queues bigint[], groups text[]) RETURNS integer
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    filled integer;
BEGIN
    UPDATE windrow.job j
    -- Never before now(): claims do not look below the floor.
    SET group_slot = first.slot, visible_at = greatest(j.run_at, clock_timestamp())
    FROM (
        SELECT locked.ctid, g.free[row_number() OVER (PARTITION BY g.turn)] AS slot
        FROM (
            SELECT
                n.*,
                ARRAY(
                    SELECT s.slot::smallint
                    FROM generate_series(1, coalesce(q.group_concurrency, 1)) AS s (slot)
                    WHERE NOT EXISTS (
                        SELECT FROM windrow.job h
                        WHERE h.queue_id = n.queue_id AND h.group_key = n.group_key AND h.group_slot = s.slot::smallint
                        OFFSET 0
                    )
                ) AS free
            FROM unnest(queues, groups) WITH ORDINALITY AS n (queue_id, group_key, turn)
            -- While the queue's slot moves, neither shard gives group slots: so a group has at most k of them on both
            -- together.
            JOIN windrow.queue q ON q.queue_id = n.queue_id
            JOIN windrow.owned_slot o ON o.slot = q.slot AND o.state = 'owned' AND NOT o.arriving
            WHERE EXISTS (
                SELECT FROM windrow.job w
                WHERE w.queue_id = n.queue_id AND w.group_key = n.group_key AND w.group_slot IS NULL
                    AND NOT isfinite(w.visible_at) AND isfinite(w.run_at)
                OFFSET 0
            )
            OFFSET 0
        ) g
        CROSS JOIN LATERAL (
            -- If another session has locked one of the first jobs, do not wait: it may wait for this bucket. It ends or
            -- changes that job, and then fills the group itself. Never take a later job instead, out of order.
            SELECT f.ctid
            FROM windrow.job f
            WHERE f.ctid = ANY (ARRAY(
                SELECT w.ctid
                FROM windrow.job w
                WHERE w.queue_id = g.queue_id AND w.group_key = g.group_key AND w.group_slot IS NULL
                    AND NOT isfinite(w.visible_at) AND isfinite(w.run_at)
                ORDER BY w.run_at, w.id
                LIMIT cardinality(g.free)
            )) AND NOT isfinite(f.visible_at) AND isfinite(f.run_at) AND f.group_slot IS NULL
            FOR UPDATE SKIP LOCKED
        ) locked
        OFFSET 0
    ) first
    WHERE j.ctid = first.ctid;
    GET DIAGNOSTICS filled = ROW_COUNT;
    RETURN filled;
END
$$;

-- Both, for a sweep.
CREATE FUNCTION windrow.fill_groups(queues bigint[], groups text[]) RETURNS integer
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM windrow.lock_group_buckets(queues, groups);
    RETURN windrow.fill_group_slots(queues, groups);
END
$$;

-- For an enqueue, which knows its groups: locks their buckets before the first insert. Its jobs then get free slots as they
-- are inserted, and nothing is left to do afterwards. `groups` is empty if no job has one.
CREATE FUNCTION windrow.lock_groups(queues bigint[], groups text[]) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF groups <> '{}' THEN
        PERFORM windrow.lock_group_buckets(queues, groups);
        PERFORM set_config('windrow.groups_locked', 'on', true);
    END IF;
    RETURN true;
END
$$;

-- A new job of a group waits, unless its bucket is locked and the group has a free slot and no job that waits.
CREATE FUNCTION windrow.wait_for_slot() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('windrow.groups_locked', true) = 'on' AND NOT EXISTS (
        SELECT FROM windrow.job w
        WHERE w.queue_id = NEW.queue_id AND w.group_key = NEW.group_key AND w.group_slot IS NULL
            AND NOT isfinite(w.visible_at) AND isfinite(w.run_at)
    ) THEN
        SELECT s.slot INTO NEW.group_slot
        FROM windrow.queue q
        JOIN windrow.owned_slot o ON o.slot = q.slot AND o.state = 'owned' AND NOT o.arriving
        CROSS JOIN generate_series(1, coalesce(q.group_concurrency, 1)) AS s (slot)
        WHERE q.queue_id = NEW.queue_id AND NOT EXISTS (
            SELECT FROM windrow.job h
            WHERE h.queue_id = NEW.queue_id AND h.group_key = NEW.group_key AND h.group_slot = s.slot::smallint
            OFFSET 0
        )
        LIMIT 1;
    END IF;
    IF NEW.group_slot IS NULL THEN
        NEW.visible_at := 'infinity';
    END IF;
    RETURN NEW;
END
$$;

-- Notes a group whose jobs this transaction has changed, as an element of a JSON array. The setting ends with the
-- transaction.
CREATE FUNCTION windrow.note_group() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    noted text := current_setting('windrow.groups_noted', true);
BEGIN
    IF TG_OP = 'DELETE' THEN
        noted := set_config(
            'windrow.groups_noted', concat(noted, ',[', OLD.queue_id, ',', to_json(OLD.group_key), ']'), true
        );
    ELSE
        noted := set_config(
            'windrow.groups_noted', concat(noted, ',[', NEW.queue_id, ',', to_json(NEW.group_key), ']'), true
        );
    END IF;
    RETURN NULL;
END
$$;

-- Runs when the transaction commits, for each row. The first run fills all noted groups. Workflows (0019_workflows.sql)
-- are folded before: their locks come first, and released jobs wait for slots.
CREATE FUNCTION windrow.fill_noted_groups() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    noted text;
    queues bigint[];
    groups text[];
BEGIN
    PERFORM windrow.fold_noted_workflows();
    noted := current_setting('windrow.groups_noted', true);
    IF noted <> '' THEN
        PERFORM set_config('windrow.groups_noted', '', true);
        SELECT array_agg(n.queue_id), array_agg(n.group_key) INTO queues, groups
        FROM (
            SELECT DISTINCT (e ->> 0)::bigint AS queue_id, e ->> 1 AS group_key
            FROM jsonb_array_elements(('[' || substr(noted, 2) || ']')::jsonb) e
        ) n;
        PERFORM windrow.lock_group_buckets(queues, groups);
        PERFORM windrow.fill_group_slots(queues, groups);
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER group_waits BEFORE INSERT ON windrow.job FOR EACH ROW
    WHEN (NEW.group_key IS NOT NULL AND NEW.group_slot IS NULL AND NEW.lease IS NULL AND NEW.visible_at <= now())
    EXECUTE FUNCTION windrow.wait_for_slot();

-- Not after an enqueue, which has locked the buckets of its groups: a job that waits there found no free slot.
CREATE TRIGGER group_note_insert AFTER INSERT ON windrow.job FOR EACH ROW
    WHEN (
        NEW.group_key IS NOT NULL AND NEW.visible_at = 'infinity' AND NEW.run_at < 'infinity'
        AND current_setting('windrow.groups_locked', true) IS DISTINCT FROM 'on'
    )
    EXECUTE FUNCTION windrow.note_group();
CREATE CONSTRAINT TRIGGER group_fill_insert AFTER INSERT ON windrow.job DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (
        NEW.group_key IS NOT NULL AND NEW.visible_at = 'infinity' AND NEW.run_at < 'infinity'
        AND current_setting('windrow.groups_locked', true) IS DISTINCT FROM 'on'
    )
    EXECUTE FUNCTION windrow.fill_noted_groups();

CREATE TRIGGER group_note_delete AFTER DELETE ON windrow.job FOR EACH ROW
    WHEN (
        OLD.group_key IS NOT NULL
        AND (OLD.group_slot IS NOT NULL OR OLD.visible_at = 'infinity' AND OLD.run_at < 'infinity')
    )
    EXECUTE FUNCTION windrow.note_group();
CREATE CONSTRAINT TRIGGER group_fill_delete AFTER DELETE ON windrow.job DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (
        OLD.group_key IS NOT NULL
        AND (OLD.group_slot IS NOT NULL OR OLD.visible_at = 'infinity' AND OLD.run_at < 'infinity')
    )
    EXECUTE FUNCTION windrow.fill_noted_groups();

-- A job that gave its slot up, began to wait, or was changed while it waited.
CREATE TRIGGER group_note_update AFTER UPDATE ON windrow.job FOR EACH ROW
    WHEN (
        NEW.group_key IS NOT NULL AND NEW.group_slot IS NULL AND NEW.run_at < 'infinity'
        AND (OLD.group_slot IS NOT NULL OR NEW.visible_at = 'infinity' OR OLD.visible_at = 'infinity')
    )
    EXECUTE FUNCTION windrow.note_group();
CREATE CONSTRAINT TRIGGER group_fill_update AFTER UPDATE ON windrow.job DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (
        NEW.group_key IS NOT NULL AND NEW.group_slot IS NULL AND NEW.run_at < 'infinity'
        AND (OLD.group_slot IS NOT NULL OR NEW.visible_at = 'infinity' OR OLD.visible_at = 'infinity')
    )
    EXECUTE FUNCTION windrow.fill_noted_groups();
