-- Compares a mark that the catalog has confirmed with the marks of this shard. Returns whether the shard has the mark,
-- and whether the mark is older than all marks that the shard keeps.
SELECT
    EXISTS (SELECT FROM windrow.mark m WHERE m.token = %(token)s::uuid) AS has_it,
    coalesce((SELECT min(m.number) FROM windrow.mark m) > %(number)s, false) AS is_past
