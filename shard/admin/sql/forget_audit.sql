-- Deletes up to 1,000 entries that are older than `days` days, the oldest first.
DELETE FROM windrow.audit a
WHERE a.id = ANY (ARRAY(
    SELECT o.id
    FROM windrow.audit o
    WHERE o.at < now() - %(days)s * interval '1 day'
    ORDER BY o.at
    LIMIT 1000
))
RETURNING 1
