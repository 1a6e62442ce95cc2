-- For how many days each queue of an org keeps what it finishes.
SELECT q.queue, coalesce(q.kept, 30) FROM windrow.queue q WHERE q.org = %(org)s ORDER BY q.queue
