-- The catalog: where every slot lives. Made on every shard, used on one (the cluster file says which).

-- A cluster's name, so that two clusters never share a catalog, and the epoch of the latest change.
CREATE TABLE windrow.catalog (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    cluster text COLLATE "C" NOT NULL,
    epoch bigint NOT NULL CHECK (epoch >= 1)
);

-- Normal: writes = reads = {A}. While the slot moves from A to B: writes {B}, reads {A, B}.
CREATE TABLE windrow.placement (
    slot smallint PRIMARY KEY CHECK (slot BETWEEN 0 AND 16383),
    writes text[] NOT NULL CHECK (cardinality(writes) >= 1),
    reads text[] NOT NULL CHECK (writes <@ reads),
    epoch bigint NOT NULL
);

-- Orgs that do not follow their slot: a shard of their own, or residency.
CREATE TABLE windrow.pin (
    org text COLLATE "C" PRIMARY KEY,
    writes text[] NOT NULL CHECK (cardinality(writes) >= 1),
    reads text[] NOT NULL CHECK (writes <@ reads),
    epoch bigint NOT NULL
);
