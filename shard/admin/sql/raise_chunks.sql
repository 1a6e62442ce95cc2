-- Makes the target of a move skip the chunks up to these numbers, because it has stored or lost them: the move
-- continues after them.
UPDATE windrow.owned_slot o SET chunk = n.chunk
FROM unnest(%(slots)s::smallint[], %(chunks)s::integer[]) AS n (slot, chunk)
WHERE o.slot = n.slot AND o.state = 'owned' AND o.epoch = %(epoch)s AND o.chunk < n.chunk
