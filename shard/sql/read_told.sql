-- What this shard tells its orgs, but for those that it tells nothing.
SELECT o.org, o.retention, CASE WHEN o.held THEN 'held before the catalog was restored' END
FROM windrow.org o
WHERE o.retention IS NOT NULL OR o.held
