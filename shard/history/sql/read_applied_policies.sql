-- Returns the org policies that this shard applies. Leaves out orgs with the default policy.
SELECT o.org, o.retention, CASE WHEN o.held THEN 'held before the catalog was restored' END
FROM windrow.org o
WHERE o.retention IS NOT NULL OR o.held
