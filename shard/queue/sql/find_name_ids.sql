-- Returns the ids of those of these queue names that exist.
SELECT n.queue, n.name_id FROM windrow.queue_name n WHERE n.queue = ANY (%(queues)s::text[])
