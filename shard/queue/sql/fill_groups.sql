-- Gives the free slots of these groups to the first jobs that wait. Returns how many jobs got slots.
SELECT windrow.fill_groups(%(queue_ids)s::bigint[], %(groups)s::text[])
