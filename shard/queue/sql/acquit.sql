-- Forgets the crashes of a kind whose jobs have ended properly since then.
DELETE FROM windrow.crash c
WHERE c.queue_id = %(queue_id)s AND c.kind = %(kind)s AND c.job_id = ANY (%(jobs)s::uuid[])
