-- Lets the target give group slots to the jobs of these slots. Run this statement when the source has no more jobs of
-- these slots. Then the sweep of a router finds the groups whose jobs wait.
UPDATE windrow.owned_slot o SET arriving = false
WHERE o.slot = ANY (%(slots)s::smallint[]) AND o.epoch = %(epoch)s AND o.arriving
