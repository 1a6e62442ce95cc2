-- BREAKING: routers of earlier releases compare no epochs, and so may not work beside one that moves slots; their
-- enqueues count on ids that are unique on the shard.
-- Slots that move from shard to shard (docs/decisions/0017-moving-slots.md), and ids that are an org's own.

-- The last chunk of the slot's jobs that departed from here, or was taken here, under `epoch`. Slots from 16,384 on are
-- those of pinned orgs.
ALTER TABLE windrow.owned_slot
    ADD COLUMN chunk integer NOT NULL DEFAULT 0,
    DROP CONSTRAINT owned_slot_slot_check, ADD CONSTRAINT owned_slot_slot_check CHECK (slot >= 0);
ALTER TABLE windrow.org
    DROP CONSTRAINT org_slot_check, ADD CONSTRAINT org_slot_check CHECK (slot >= 0);
CREATE INDEX org_slot ON windrow.org (slot);

-- Two orgs may use one id, and meet on one shard.
ALTER TABLE windrow.job DROP CONSTRAINT job_pkey;
CREATE UNIQUE INDEX job_id ON windrow.job (id, (queue_id & 4294967295));
ALTER TABLE windrow.dead DROP CONSTRAINT dead_pkey;
CREATE UNIQUE INDEX dead_id ON windrow.dead (id, (queue_id & 4294967295));

-- Jobs on their way to another shard: in nobody's sight but of those who look for ids. The columns of `dead`, where
-- `reason` is NULL for a job that is not; such a job has no lease, and is visible at its run_at. A row travels as text, as
-- Postgres writes it: a shard that has other columns refuses it.
CREATE TABLE windrow.departing (
    slot smallint NOT NULL,
    epoch bigint NOT NULL,
    chunk integer NOT NULL,
    id uuid NOT NULL,
    queue_id bigint NOT NULL,
    enqueued_at timestamptz NOT NULL,
    run_at timestamptz NOT NULL,
    finished_at timestamptz,
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
    reason text,
    CONSTRAINT dead_at_a_time_for_a_reason CHECK ((finished_at IS NULL) = (reason IS NULL)),
    CONSTRAINT only_the_dead_keep_a_lease CHECK (reason IS NOT NULL OR lease IS NULL)
) WITH (
    -- Every row is deleted soon: clean up by count.
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX departing_id ON windrow.departing (id);
CREATE INDEX departing_slot ON windrow.departing (slot);

-- The second look of an enqueue asks for ids of one org. Ids are not compared with those of `departing`: a slot of which
-- jobs depart takes none.
DROP FUNCTION windrow.refuse_foreign(uuid[], bigint[], timestamptz);
DROP FUNCTION windrow.refuse_settled(uuid[], timestamptz);
CREATE FUNCTION windrow.refuse_settled(ids uuid[], queue_ids bigint[], since timestamptz) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    -- By the ids alone; whose they are is asked of what is found, which is next to nothing.
    IF EXISTS (
        SELECT FROM windrow.finished f
        WHERE f.id = ANY (ids) AND f.finished_at >= since AND f.queue_id & 4294967295 = ANY (ARRAY(
            SELECT n.queue_id & 4294967295 FROM unnest(ids, queue_ids) AS n (id, queue_id) WHERE n.id = f.id
        ))
    )
        OR EXISTS (
            SELECT FROM windrow.dead d
            WHERE d.id = ANY (ids) AND d.queue_id & 4294967295 = ANY (ARRAY(
                SELECT n.queue_id & 4294967295 FROM unnest(ids, queue_ids) AS n (id, queue_id) WHERE n.id = d.id
            ))
        )
    THEN
        RAISE EXCEPTION 'a job of this batch has already finished or died' USING ERRCODE = 'WD001';
    END IF;
    RETURN false;
END
$$;

-- The catalog. `reads` lists shards in the order in which jobs travel; a slot with one is at rest.
ALTER TABLE windrow.placement
    DROP CONSTRAINT placement_slot_check, ADD CONSTRAINT placement_slot_check CHECK (slot >= 0),
    -- The catalog's epoch since which the row, or what is kept of its slot elsewhere, is as it is: whoever has a copy asks
    -- for what is newer.
    ADD COLUMN changed bigint NOT NULL DEFAULT 1;
CREATE INDEX placement_changed ON windrow.placement (changed);

-- Who has been the writer of a slot: the shards that may know ids and dedup keys of its jobs, and hold finished ones.
CREATE TABLE windrow.former_owner (
    slot smallint NOT NULL REFERENCES windrow.placement,
    shard text COLLATE "C" NOT NULL,
    left_at timestamptz NOT NULL,
    PRIMARY KEY (slot, shard)
);

-- Orgs that do not follow their hash: each has a slot of its own, for ever. No release could pin any so far.
DROP TABLE windrow.pin;
CREATE TABLE windrow.pin (
    org text COLLATE "C" PRIMARY KEY,
    slot smallint NOT NULL UNIQUE CHECK (slot >= 16384) REFERENCES windrow.placement,
    -- Of the catalog when the org got its slot: by it the shard where it lived then owns that.
    epoch bigint NOT NULL,
    -- Where the org is to live: on this shard, or on one that has this label. NULLs: where its hash slot does.
    shard text COLLATE "C",
    label text COLLATE "C",
    value text COLLATE "C",
    CONSTRAINT label_with_a_value CHECK ((label IS NULL) = (value IS NULL)),
    CONSTRAINT one_wish CHECK (shard IS NULL OR label IS NULL)
);
