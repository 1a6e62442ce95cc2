-- Records a shard's mark in the catalog, if the shard also has the mark that was recorded before, or has only newer
-- ones. So a database that lost a mark never has a later one confirmed. Returns a row if the mark was recorded.
UPDATE windrow.shard s
SET mark = %(number)s, mark_token = %(token)s::uuid, marked_at = now()
WHERE s.shard = %(shard)s
    AND (
        s.mark IS NULL
        OR s.mark < %(number)s AND (s.mark_token = ANY (%(before)s::uuid[]) OR s.mark < %(oldest)s)
    )
RETURNING s.mark
