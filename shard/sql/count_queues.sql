-- How many queues each org has, up to what it may have; those deleted too, for their rows stay.
SELECT n.org, (
    SELECT count(*) FROM (SELECT FROM windrow.queue q WHERE q.org = n.org LIMIT %(queues_max)s) counted
)
FROM unnest(%(orgs)s::text[]) AS n (org)
