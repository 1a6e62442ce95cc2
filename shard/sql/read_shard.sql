-- What the catalog knows of a shard: whether its database has been made, and the id of that; how many slots it holds, how
-- many have left it for which it may be asked, and its mark that was confirmed last.
SELECT
    s.shard IS NOT NULL AS made, s.id::text,
    (SELECT count(*) FROM windrow.placement p WHERE %(shard)s = ANY (p.reads)) AS slots,
    (SELECT count(*) FROM windrow.former_owner f WHERE f.shard = %(shard)s) AS slots_left,
    -- A schema of an earlier release has no such columns.
    (to_jsonb(s) ->> 'mark')::bigint AS mark, to_jsonb(s) ->> 'mark_token' AS mark_token
FROM (SELECT 1) one
LEFT JOIN windrow.shard s ON s.shard = %(shard)s
