-- What the catalog knows about a shard: the id of its database, if that is recorded; how many slots it holds; how many
-- slots have left it and for which it may still be asked; and its mark that was confirmed last.
SELECT
    s.id::text,
    (SELECT count(*) FROM windrow.placement p WHERE %(shard)s = ANY (p.reads)) AS slots,
    (SELECT count(*) FROM windrow.former_owner f WHERE f.shard = %(shard)s) AS slots_left,
    s.mark, s.mark_token::text
FROM (SELECT 1) one
LEFT JOIN windrow.shard s ON s.shard = %(shard)s
