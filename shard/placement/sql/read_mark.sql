-- The mark of a shard that the catalog confirmed last, and the time at which it did.
SELECT s.mark, s.mark_token::text, s.marked_at FROM windrow.shard s WHERE s.shard = %(shard)s AND s.mark IS NOT NULL
