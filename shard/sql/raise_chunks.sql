-- Jobs up to these chunks of a move are taken as lost here, or as arrived: the move goes on behind them.
UPDATE windrow.owned_slot o SET chunk = n.chunk
FROM unnest(%(slots)s::smallint[], %(chunks)s::integer[]) AS n (slot, chunk)
WHERE o.slot = n.slot AND o.state = 'owned' AND o.epoch = %(epoch)s AND o.chunk < n.chunk
