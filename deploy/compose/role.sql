-- Run once, by the superuser, on a new shard: the role and database that the routers use. No superuser rights are needed
-- to make and use Windrow's schema; owning the database is enough.
\set password `cat /run/secrets/windrow_password`
CREATE ROLE windrow LOGIN PASSWORD :'password';
CREATE DATABASE windrow OWNER windrow;
REVOKE ALL ON DATABASE windrow FROM PUBLIC;
