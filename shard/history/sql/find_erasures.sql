-- Returns the erasures that have not ended, the oldest first.
SELECT e.id::text, e.org_id FROM windrow.erasure e WHERE e.ended_at IS NULL ORDER BY e.begun_at
