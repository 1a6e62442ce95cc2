-- Stores the records of runs of schedules that come from another shard.
INSERT INTO windrow.schedule_run
SELECT r.* FROM unnest(%(rows)s::text[]) AS n (rows) CROSS JOIN LATERAL unnest(n.rows::windrow.schedule_run[]) r
