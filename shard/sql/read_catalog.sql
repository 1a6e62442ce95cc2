-- The whole catalog, from one snapshot: every slot in order, then every pinned org.
SELECT (SELECT c.epoch FROM windrow.catalog c) AS catalog_epoch, p.slot, NULL::text AS org, p.writes, p.reads, p.epoch
FROM windrow.placement p
UNION ALL
SELECT NULL, NULL, p.org, p.writes, p.reads, p.epoch
FROM windrow.pin p
ORDER BY slot
