-- Prolongs live leases; never shortens one.
UPDATE windrow.job AS j
SET visible_at = greatest(j.visible_at, now() + %(window_us)s * interval '1 us')
FROM (
    SELECT g.id, g.lease FROM unnest(%(ids)s::uuid[], %(leases)s::bigint[]) AS g (id, lease) ORDER BY g.id
) x
-- Found by its id and by nothing else: ANY and IS TRUE keep the planner from walking a whole index of a table that it
-- believes to be empty, because it was when last vacuumed.
WHERE j.id = ANY (ARRAY[x.id])
    AND (j.lease = x.lease AND j.visible_at > now()
        AND j.queue_id & 4294967295 = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)) IS TRUE
RETURNING j.id::text, j.lease
