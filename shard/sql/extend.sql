-- Prolongs live leases; never shortens one.
UPDATE windrow.job AS j
SET visible_at = greatest(j.visible_at, now() + x.window_us * interval '1 us')
FROM (
    -- Where several calls name one lease, the longest window is in force: each of them is told OK.
    SELECT g.id, g.lease, g.turn, max(g.window_us) AS window_us
    FROM unnest(%(ids)s::uuid[], %(leases)s::bigint[], %(turns)s::smallint[], %(windows_us)s::bigint[])
        AS g (id, lease, turn, window_us)
    GROUP BY g.id, g.lease, g.turn
    ORDER BY g.id
) x
-- Found by its id and by nothing else: ANY and IS TRUE keep the planner from walking a whole index of a table that it
-- believes to be empty, because it was when last vacuumed.
WHERE j.id = ANY (ARRAY[x.id])
    AND (j.lease = x.lease AND j.visible_at > now()
        AND j.queue_id & 4294967295 = (SELECT windrow.org_ids(%(orgs)s::text[]))[coalesce(x.turn, 1)]) IS TRUE
RETURNING j.id::text, j.lease
