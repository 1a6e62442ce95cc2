-- The superuser runs this once on a new shard. It creates the role and the database that the routers use. The role needs no
-- superuser rights: it owns the database, which is enough to create and use Windrow's schema.
\set password `cat /run/secrets/windrow_password`
CREATE ROLE windrow LOGIN PASSWORD :'password';
-- So that `windrow doctor` and the metrics see how long other roles' sessions hold snapshots.
GRANT pg_read_all_stats TO windrow;
CREATE DATABASE windrow OWNER windrow;
REVOKE ALL ON DATABASE windrow FROM PUBLIC;
