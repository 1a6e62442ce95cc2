-- The time at which a job finishes: {{finish_time}} of shard/postgres/sql_loader.py, for functions.
CREATE OR REPLACE FUNCTION windrow.finish_time() RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT greatest(now(), (SELECT timestamptz 'epoch' + c.last_value * interval '1 us' FROM windrow.clock c))
$$;
