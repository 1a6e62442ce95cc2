-- The retentions for which this shard has partitions, and the retentions of queues and orgs, for which it will have
-- partitions.
SELECT split_part(c.relname, '_', 2)::smallint AS retention
FROM pg_inherits i
JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'windrow.finished'::regclass
UNION
SELECT q.kept FROM windrow.queue q WHERE q.kept IS NOT NULL
UNION
SELECT o.retention FROM windrow.org o WHERE o.retention IS NOT NULL
ORDER BY retention
