-- Forgets the crashes of these jobs of a kind: after the crashes, the jobs have ended properly or were cancelled.
DELETE FROM windrow.crash c
WHERE c.queue_id = %(queue_id)s AND c.kind = %(kind)s AND c.job_id = ANY (%(jobs)s::uuid[])
