-- Deletes ends of nodes of which the target was told.
DELETE FROM windrow.workflow_arrival a WHERE a.number = ANY (%(numbers)s::bigint[])
