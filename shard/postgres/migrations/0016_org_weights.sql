-- LOCKS ACCESS EXCLUSIVE: catalog
-- The weights of orgs at consumers of all orgs (docs/decisions/0048-fair-shares-of-all-orgs-consumers.md). Only the catalog
-- has rows here. An org without a row has the weight 1.
CREATE TABLE windrow.org_weight (
    org text COLLATE "C" PRIMARY KEY,
    weight double precision NOT NULL CHECK (weight BETWEEN 0.001 AND 1000)
);

-- The version of the weights. Routers read it with every look at the catalog, and all weights if it has changed.
ALTER TABLE windrow.catalog ADD COLUMN weights_changed bigint NOT NULL DEFAULT 0;
