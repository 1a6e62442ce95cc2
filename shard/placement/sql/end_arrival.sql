-- Lets the target give group slots to the jobs of these slots: the source has no job of theirs left. The sweep of a router
-- finds the groups whose jobs wait.
UPDATE windrow.owned_slot o SET arriving = false
WHERE o.slot = ANY (%(slots)s::smallint[]) AND o.epoch = %(epoch)s AND o.arriving
