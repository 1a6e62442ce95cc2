-- Where orgs live. Every shard says which shard it is and which slots it owns. The catalog says where every slot is;
-- every shard has its tables too, and the cluster file names the database whose tables are used.

-- ── Each shard ───────────────────────────────────────────────────────────────────────────────────────────────────────

-- Which shard this database belongs to. If a DSN leads to another shard's database, routers refuse it
-- (docs/decisions/0023-a-shard-is-its-database.md).
CREATE TABLE windrow.identity (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    cluster text COLLATE "C" NOT NULL,
    shard text COLLATE "C" NOT NULL,
    -- Random, because another cluster may use the same names. Copies and backups have the same id.
    id uuid NOT NULL
);

-- The slots whose enqueues this shard accepts. A router with another placement is refused (I6). The epoch is the
-- catalog's; an older epoch never overwrites a newer one.
CREATE TABLE windrow.owned_slot (
    -- Slots from 16,384 on belong to pinned orgs.
    slot smallint PRIMARY KEY CHECK (slot >= 0),
    state text COLLATE "C" NOT NULL CHECK (state IN ('owned', 'draining')),
    epoch bigint NOT NULL,
    -- The last chunk of the slot's jobs that departed from here, or was stored here, in this epoch.
    chunk integer NOT NULL DEFAULT 0
);

-- Marks in the history of this shard, the newest of them. A database that lacks a mark which the catalog has confirmed
-- has lost history (docs/decisions/0028-a-shard-that-lost-history.md).
CREATE TABLE windrow.mark (
    number bigint PRIMARY KEY,
    -- After a restore the same numbers are used again; the token distinguishes such marks.
    token uuid NOT NULL UNIQUE,
    made_at timestamptz NOT NULL DEFAULT now()
);

-- The latest time that this shard's clock has shown, in microseconds since 1970. Routers record it every few seconds
-- (shard/postgres/clock.py). If the clock shows an earlier time, it was set back. This is a sequence because a sequence
-- is updated in place: every ack reads it, and a table row would keep old versions while any transaction holds a
-- snapshot.
CREATE SEQUENCE windrow.clock;

-- ── The catalog ──────────────────────────────────────────────────────────────────────────────────────────────────────

-- A cluster's name, so that two clusters never share a catalog, and the epoch of the latest change.
CREATE TABLE windrow.catalog (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    cluster text COLLATE "C" NOT NULL,
    epoch bigint NOT NULL CHECK (epoch >= 1)
);

-- Normal: writes = reads = {A}. While the slot moves from A to B: writes {B}, reads {A, B}. `reads` lists shards in the
-- order in which jobs move.
CREATE TABLE windrow.placement (
    slot smallint PRIMARY KEY CHECK (slot >= 0),
    writes text[] NOT NULL CHECK (cardinality(writes) >= 1),
    reads text[] NOT NULL CHECK (writes <@ reads),
    epoch bigint NOT NULL,
    -- The catalog's epoch of the latest change to this row, or to rows about its slot in other tables. A process with a
    -- copy asks for newer rows.
    changed bigint NOT NULL DEFAULT 1
);
CREATE INDEX placement_changed ON windrow.placement (changed);

-- The former writers of a slot: shards that may know ids and dedup keys of its jobs, and that hold finished jobs.
CREATE TABLE windrow.former_owner (
    slot smallint NOT NULL REFERENCES windrow.placement,
    shard text COLLATE "C" NOT NULL,
    left_at timestamptz NOT NULL,
    PRIMARY KEY (slot, shard)
);

-- Pinned orgs do not live where their hash slot does: each has a slot of its own, forever.
CREATE TABLE windrow.pin (
    org text COLLATE "C" PRIMARY KEY,
    slot smallint NOT NULL UNIQUE CHECK (slot >= 16384) REFERENCES windrow.placement,
    -- The catalog's epoch when the org got its slot. The shard where the org lived then owns the slot since this epoch.
    epoch bigint NOT NULL,
    -- Where the org should live: on this shard, or on a shard with this label. NULLs: where its hash slot does.
    shard text COLLATE "C",
    label text COLLATE "C",
    value text COLLATE "C",
    CONSTRAINT label_with_a_value CHECK ((label IS NULL) = (value IS NULL)),
    CONSTRAINT one_target CHECK (shard IS NULL OR label IS NULL)
);

-- The shards whose databases have been made. For a shard that holds slots, or has held some, no database with another
-- identity.id is accepted.
CREATE TABLE windrow.shard (
    shard text COLLATE "C" PRIMARY KEY,
    id uuid NOT NULL,
    -- The newest mark that is known to be in the shard's database. NULL: none yet.
    mark bigint,
    mark_token uuid,
    marked_at timestamptz,
    CONSTRAINT mark_has_a_token CHECK ((mark IS NULL) = (mark_token IS NULL) AND (mark IS NULL) = (marked_at IS NULL))
);

-- The policy of each org about its history, copied to every shard (shard/history/org_policies.py).
CREATE TABLE windrow.policy (
    org text COLLATE "C" PRIMARY KEY,
    retention smallint CHECK (retention IN (0, 1, 7, 30, 90, 365, 2557)),
    -- Legal hold, and the reason that the operator gave.
    held_since timestamptz,
    held_for text,
    CONSTRAINT says_something CHECK (retention IS NOT NULL OR held_since IS NOT NULL),
    CONSTRAINT held_for_a_reason CHECK ((held_since IS NULL) = (held_for IS NULL))
);
-- Versions of the policies. They increase with each change, also after the catalog was restored from a backup.
CREATE TABLE windrow.policies (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    -- In the catalog: the version of the latest change.
    changed bigint NOT NULL,
    -- On a shard: the version of its copy.
    copied bigint NOT NULL
);
INSERT INTO windrow.policies (changed, copied) VALUES (0, 0);
