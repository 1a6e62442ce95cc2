-- For how many days a finished job of the queue is kept: {{retention_of}} of shard/postgres/sql_loader.py, for
-- functions.
CREATE OR REPLACE FUNCTION windrow.kept_days(of_queue bigint) RETURNS smallint LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT q.kept FROM windrow.queue q WHERE q.queue_id = of_queue AND q.kept IS NOT NULL), 30)::smallint
$$;
