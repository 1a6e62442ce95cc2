-- Gives queues of these slots the configuration that they have on another shard.
UPDATE windrow.queue AS q
SET ({{setting_columns}}, listed, created_at) = ({{setting_columns(n)}}, n.listed, c.created_at)
FROM unnest(
    %(orgs)s::text[], %(queues)s::text[], {{setting_arrays}}, %(listed)s::boolean[], %(created_at_us)s::bigint[],
    %(of_slots)s::smallint[]
) AS n (org, queue, {{setting_columns}}, listed, created_at_us, slot)
CROSS JOIN LATERAL (SELECT timestamptz 'epoch' + n.created_at_us * interval '1 us' AS created_at) c
-- On this shard, an org may already have a slot of its own while the other shard still has the org in its hash slot.
-- Then the org's queues are not changed.
WHERE q.org = n.org AND q.queue = n.queue AND q.slot = n.slot
    AND ({{setting_columns(q)}}, q.listed, q.created_at) IS DISTINCT FROM ({{setting_columns(n)}}, n.listed, c.created_at)
