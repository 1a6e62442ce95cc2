-- The superuser runs this once on a new shard. It creates the role and the database that the routers use. The role needs no
-- superuser rights: it owns the database, which is enough to create and use Windrow's schema.
\set password `cat /run/secrets/windrow_password`
CREATE ROLE windrow LOGIN PASSWORD :'password';
CREATE DATABASE windrow OWNER windrow;
REVOKE ALL ON DATABASE windrow FROM PUBLIC;
