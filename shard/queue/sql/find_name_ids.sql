-- Returns the ids of these queue names, as far as they exist.
SELECT n.queue, n.name_id FROM windrow.queue_name n WHERE n.queue = ANY (%(queues)s::text[])
