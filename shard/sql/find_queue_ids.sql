-- The ids of those of one org's queues that exist.
SELECT q.queue, q.queue_id FROM windrow.queue q WHERE q.org = %(org)s AND q.queue = ANY (%(queues)s::text[])
