-- The API keys with these ids, and the number of revocations in the same snapshot. One row without a key if there is
-- none. What is left of a key's time is counted here, so that routers need not compare clocks.
SELECT
    c.revocations, k.id, k.secret_sha256, k.org, k.scopes,
    extract(epoch FROM k.expires_at - now())::float8 AS expires_in_s, k.revoked_at IS NOT NULL AS revoked
FROM windrow.catalog c
LEFT JOIN windrow.api_key k ON k.id = ANY (%(ids)s::text[])
