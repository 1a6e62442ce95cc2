-- Returns the backlog of an org, or of one of its queues, in jobs or in bytes. Stops counting at `counted_max`.
SELECT windrow.count_backlog(%(org)s::text, %(queue)s::text, %(in_bytes)s::boolean, %(counted_max)s::bigint)
