-- Creates the catalog of a cluster, at its first epoch.
INSERT INTO windrow.catalog (cluster, epoch) VALUES (%(cluster)s, 1)
