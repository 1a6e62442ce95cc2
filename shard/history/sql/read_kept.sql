-- Returns for how many days each queue of an org keeps its finished jobs.
SELECT q.queue, coalesce(q.kept, {{retention_default}}) FROM windrow.queue q WHERE q.org = %(org)s ORDER BY q.queue
