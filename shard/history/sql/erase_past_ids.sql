-- Erases the ids of dropped jobs of an org that is being erased. There is no index by org, so the statement has to read
-- the ids of all orgs. Therefore the statement erases all ids of the org at once.
WITH ids AS (
    DELETE FROM windrow.past_id p WHERE p.org_id = %(org_id)s
    RETURNING 1
)
UPDATE windrow.erasure e SET past_ids = e.past_ids + (SELECT count(*) FROM ids)
WHERE e.org_id = %(org_id)s AND e.ended_at IS NULL
