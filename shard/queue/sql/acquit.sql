-- Forgets those crashes of a kind after which the jobs have ended properly.
DELETE FROM windrow.crash c
WHERE c.queue_id = %(queue_id)s AND c.kind = %(kind)s AND c.job_id = ANY (%(jobs)s::uuid[])
