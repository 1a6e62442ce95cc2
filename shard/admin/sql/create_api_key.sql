-- Stores a new API key. The time until the key expires counts from now, by the catalog's clock.
INSERT INTO windrow.api_key AS k (id, secret_sha256, org, scopes, name, expires_at)
VALUES (
    %(id)s, %(secret_sha256)s, %(org)s, %(scopes)s::text[], %(name)s,
    now() + %(expires_in_s)s::bigint * interval '1 s'
)
RETURNING k.id, k.org, k.scopes, k.name, k.created_at, k.expires_at, k.revoked_at, k.last_used, false AS expired
