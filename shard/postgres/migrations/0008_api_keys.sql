-- LOCKS ACCESS EXCLUSIVE: catalog
-- API keys, by which callers prove who they are. Only the catalog's tables are used. A key is `wr_ID_SECRET`; of the
-- secret only its SHA-256 is stored, which is enough for 32 random bytes. A revoked key stays, so that its id keeps its
-- meaning in logs.
CREATE TABLE windrow.api_key (
    id text COLLATE "C" PRIMARY KEY CHECK (id ~ '^[a-z2-7]{12}$'),
    secret_sha256 bytea NOT NULL CHECK (octet_length(secret_sha256) = 32),
    -- NULL: all orgs.
    org text COLLATE "C",
    scopes text[] NOT NULL CHECK (
        cardinality(scopes) >= 1 AND scopes <@ ARRAY['enqueue', 'consume', 'read', 'admin', 'cluster']
    ),
    -- What the operator wrote, for people.
    name text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz,
    revoked_at timestamptz,
    -- The latest UTC day on which a router took it.
    last_used date,
    CONSTRAINT cluster_is_for_all_orgs CHECK (org IS NULL OR NOT 'cluster' = ANY (scopes))
);

-- How often keys were revoked. Routers read it with every look at the catalog, and then judge the keys that they know
-- again.
ALTER TABLE windrow.catalog ADD COLUMN revocations bigint NOT NULL DEFAULT 0;
