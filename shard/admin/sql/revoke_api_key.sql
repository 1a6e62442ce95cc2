-- Revokes an API key, and notifies all routers. Does not change a key that is revoked already. Returns the key, or no
-- row if no key has this id.
WITH revoked AS (
    UPDATE windrow.api_key SET revoked_at = now() WHERE id = %(id)s AND revoked_at IS NULL RETURNING id, revoked_at
), counted AS (
    UPDATE windrow.catalog c SET revocations = c.revocations + 1 WHERE EXISTS (SELECT FROM revoked) RETURNING c.revocations
)
SELECT
    k.id, k.org, k.scopes, k.name, k.created_at, k.expires_at, coalesce(r.revoked_at, k.revoked_at) AS revoked_at,
    k.last_used, coalesce(k.expires_at <= now(), false) AS expired
FROM windrow.api_key k
LEFT JOIN revoked r ON r.id = k.id
-- All routers listen to this channel.
LEFT JOIN (SELECT pg_notify('windrow_catalog', 'revocation ' || counted.revocations) FROM counted) told ON true
WHERE k.id = %(id)s
