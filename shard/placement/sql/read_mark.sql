-- Returns a shard's newest confirmed mark, and the time at which the catalog confirmed it.
SELECT s.mark, s.mark_token::text, s.marked_at FROM windrow.shard s WHERE s.shard = %(shard)s AND s.mark IS NOT NULL
