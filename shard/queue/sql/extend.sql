-- Prolongs live leases; never shortens one.
UPDATE windrow.job AS j
SET visible_at = greatest(j.visible_at, now() + x.window_us * interval '1 us')
FROM (
    -- If several calls name one lease, the longest window counts, and each of the calls gets OK.
    SELECT g.id, g.lease, g.org_position, max(g.window_us) AS window_us
    FROM unnest(%(ids)s::uuid[], %(leases)s::bigint[], %(org_positions)s::smallint[], %(windows_us)s::bigint[])
        AS g (id, lease, org_position, window_us)
    GROUP BY g.id, g.lease, g.org_position
    ORDER BY g.id
) x
-- The job must be found by its id alone. If the table was empty at the last vacuum, the planner expects it to be empty,
-- and could choose a scan of a whole index. ANY and IS TRUE prevent that.
WHERE j.id = ANY (ARRAY[x.id])
    AND (j.lease = x.lease AND j.visible_at > now()
        AND {{org_of(j)}} = {{org_id_of(x)}}) IS TRUE
RETURNING j.id::text, j.lease
