-- What this shard knows of a mark that the catalog has confirmed: whether it has it, whether the mark is older than all that
-- are kept here, and the newest mark that is here.
SELECT
    EXISTS (SELECT FROM windrow.mark m WHERE m.token = %(token)s::uuid) AS has_it,
    coalesce((SELECT min(m.number) FROM windrow.mark m) > %(number)s, false) AS is_past,
    (SELECT max(m.number) FROM windrow.mark m) AS newest,
    (SELECT max(m.made_at) FROM windrow.mark m) AS newest_at
