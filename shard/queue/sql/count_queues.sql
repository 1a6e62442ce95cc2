-- Counts the queues of each org, up to queues_max. Deleted queues count too, because their rows are kept. Also returns
-- the shard's time.
SELECT n.org, (
    SELECT count(*) FROM (SELECT FROM windrow.queue q WHERE q.org = n.org LIMIT %(queues_max)s) counted
), (extract(epoch FROM now()) * 1000000)::bigint
FROM unnest(%(orgs)s::text[]) AS n (org)
