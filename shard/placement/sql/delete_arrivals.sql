-- Deletes the ends of nodes of which the target has been told.
DELETE FROM windrow.workflow_arrival a WHERE a.number = ANY (%(numbers)s::bigint[])
