-- Returns the API keys with these ids, and the number of revocations in the same snapshot. If no such key exists,
-- returns one row without a key. The remaining time of a key is computed here, so that routers need not compare clocks.
SELECT
    c.revocations, k.id, k.secret_sha256, k.org, k.scopes,
    extract(epoch FROM k.expires_at - now())::float8 AS expires_in_s, k.revoked_at IS NOT NULL AS revoked
FROM windrow.catalog c
LEFT JOIN windrow.api_key k ON k.id = ANY (%(ids)s::text[])
