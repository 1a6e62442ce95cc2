-- Returns a row if the org had a job with this id that was deleted at the end of its retention.
SELECT p.day
FROM windrow.past_id p
JOIN windrow.org o ON o.org_id = p.org_id
WHERE p.id = %(id)s::uuid AND o.org = %(org)s
LIMIT 1
