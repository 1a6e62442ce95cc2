-- Lets the target give group slots to the jobs of these slots. It runs when no job of these slots is left on the
-- source. The sweep of a router then finds the groups whose jobs wait.
UPDATE windrow.owned_slot o SET arriving = false
WHERE o.slot = ANY (%(slots)s::smallint[]) AND o.epoch = %(epoch)s AND o.arriving
