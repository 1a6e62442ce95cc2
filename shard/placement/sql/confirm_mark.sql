-- Records a shard's new mark in the catalog, if the shard also has the mark that was recorded before, or has only newer
-- marks than that. So if a database has lost the mark that the catalog has recorded, the catalog does not accept the
-- database's new marks. Returns a row if the mark was recorded.
UPDATE windrow.shard s
SET mark = %(number)s, mark_token = %(token)s::uuid, marked_at = now()
WHERE s.shard = %(shard)s
    AND (
        s.mark IS NULL
        OR s.mark < %(number)s AND (s.mark_token = ANY (%(before)s::uuid[]) OR s.mark < %(oldest)s)
    )
RETURNING s.mark
