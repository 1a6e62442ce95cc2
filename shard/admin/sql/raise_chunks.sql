-- Makes the target of a move skip the chunks up to these numbers, because the target has stored or lost them. The move
-- continues with the next chunks.
UPDATE windrow.owned_slot o SET chunk = n.chunk
FROM unnest(%(slots)s::smallint[], %(chunks)s::integer[]) AS n (slot, chunk)
WHERE o.slot = n.slot AND o.state = 'owned' AND o.epoch = %(epoch)s AND o.chunk < n.chunk
