-- Returns the ids of these queue names. Leaves out names that the shard does not have.
SELECT n.queue, n.name_id FROM windrow.queue_name n WHERE n.queue = ANY (%(queues)s::text[])
