-- Returns what the catalog knows about a shard: the id of its database, if the id is recorded, the number of slots that
-- the shard holds, the number of slots that have left the shard but about which routers may still ask it, and the mark
-- that was confirmed last.
SELECT
    s.id::text,
    (SELECT count(*) FROM windrow.placement p WHERE %(shard)s = ANY (p.reads)) AS slots,
    (SELECT count(*) FROM windrow.former_owner f WHERE f.shard = %(shard)s) AS slots_left,
    s.mark, s.mark_token::text
FROM (SELECT 1) one
LEFT JOIN windrow.shard s ON s.shard = %(shard)s
