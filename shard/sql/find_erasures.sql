-- Those that are not at their end.
SELECT e.id::text, e.org_id FROM windrow.erasure e WHERE e.ended_at IS NULL ORDER BY e.begun_at
