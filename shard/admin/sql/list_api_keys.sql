-- Returns all API keys, the newest first.
SELECT
    k.id, k.org, k.scopes, k.name, k.created_at, k.expires_at, k.revoked_at, k.last_used,
    coalesce(k.expires_at <= now(), false) AS expired
FROM windrow.api_key k
ORDER BY k.created_at DESC, k.id
