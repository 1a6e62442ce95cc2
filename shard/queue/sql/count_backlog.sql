-- Returns the backlog of an org, or of one of its queues, in jobs or in bytes. Counts no further than the limit.
SELECT windrow.count_backlog(%(org)s::text, %(queue)s::text, %(in_bytes)s::boolean, %(counted_max)s::bigint)
