-- Extends live leases, at most to the end of the job's max_runtime. Never shortens a lease. Stores what the consumer
-- reported with the extend: NULL keeps the stored value, and an empty checkpoint removes the stored checkpoint. The log
-- is always the log of the whole attempt so far.
UPDATE windrow.job AS j
SET
    visible_at = greatest(
        j.visible_at,
        least(now() + x.window_us * interval '1 us', j.leased_at + j.max_runtime_us * interval '1 us')
    ),
    progress = coalesce(x.progress::jsonb, j.progress),
    checkpoint = CASE WHEN x.checkpoint IS NULL THEN j.checkpoint ELSE nullif(x.checkpoint, '') END,
    log = coalesce(x.log, j.log)
FROM (
    -- If several calls name one lease, the longest window and the last report are stored, and each of these calls gets
    -- OK.
    SELECT
        g.id, g.lease, g.org_position, max(g.window_us) AS window_us,
        (array_agg(g.progress ORDER BY g.place DESC) FILTER (WHERE g.progress IS NOT NULL))[1] AS progress,
        (array_agg(g.checkpoint ORDER BY g.place DESC) FILTER (WHERE g.checkpoint IS NOT NULL))[1] AS checkpoint,
        (array_agg(g.log ORDER BY g.place DESC) FILTER (WHERE g.log IS NOT NULL))[1] AS log
    FROM unnest(
        %(ids)s::uuid[], %(leases)s::bigint[], %(org_positions)s::smallint[], %(windows_us)s::bigint[],
        %(progress)s::text[], %(checkpoints)b::bytea[], %(logs)s::text[]
    ) WITH ORDINALITY AS g (id, lease, org_position, window_us, progress, checkpoint, log, place)
    GROUP BY g.id, g.lease, g.org_position
    ORDER BY g.id
) x
-- Postgres must find the job by an index search for its id and its org. If the table was empty at the last vacuum, the
-- planner expects it to be empty now, and could choose a scan of a whole index. ANY and IS TRUE prevent such a scan.
-- The org is a condition of the index search, so that no row of another org is read. The reason: the time that a call
-- takes must not show whether another org has an id, even if the call names that id a thousand times.
WHERE j.id = ANY (ARRAY[x.id]) AND {{org_of(j)}} = {{org_id_of(x)}}
    AND (j.lease = x.lease AND j.visible_at > now()) IS TRUE
RETURNING j.id::text, j.lease
