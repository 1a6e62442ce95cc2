-- What operators do: the calls of methods with the scope ADMIN or CLUSTER, and the commands that change the cluster
-- (docs/decisions/0042-what-operators-do-is-written-down.md). Only in the catalog's database; other shards have the
-- table and leave it empty. It holds no payloads, no values of attributes and no secrets.
CREATE TABLE windrow.audit (
    -- Made by the process that writes the row, so that it may repeat the insert after a lost connection.
    id uuid PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    principal text COLLATE "C" NOT NULL,
    -- From where: the address of the caller without its port, or the host of a command.
    peer text COLLATE "C" NOT NULL,
    -- Such as windrow.v1.Admin/PurgeQueue, or `windrow shards pin`.
    method text COLLATE "C" NOT NULL,
    -- NULL: it is about no single org or queue.
    org text COLLATE "C",
    queue text COLLATE "C",
    -- The other fields of the request that say what was to be changed.
    request jsonb,
    -- NULL: not known. The change is under way, or the process that made it ended before it wrote the outcome.
    ended_at timestamptz,
    -- OK, or the status code and the reason of a failure.
    outcome text COLLATE "C",
    -- How many jobs were changed, by what the answer says.
    counts jsonb,
    -- Reads of one caller are counted in one row for each minute.
    calls bigint NOT NULL DEFAULT 1 CHECK (calls >= 1),
    -- Since 1970. NULL: the row is about a change.
    minute bigint,
    CONSTRAINT ended_with_an_outcome CHECK ((ended_at IS NULL) = (outcome IS NULL))
);
CREATE INDEX audit_at ON windrow.audit (at);
CREATE INDEX audit_org ON windrow.audit (org, at) WHERE org IS NOT NULL;
CREATE UNIQUE INDEX audit_reads ON windrow.audit (minute, method, principal, peer, outcome) WHERE minute IS NOT NULL;
