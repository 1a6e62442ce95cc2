-- Returns the positions of the jobs that are not live on this shard. Such jobs have ended, have left the shard, or were
-- never on it.
SELECT n.position
FROM unnest(%(ids)s::uuid[], %(org_positions)s::smallint[]) WITH ORDINALITY AS n (id, org_position, position)
-- Do not use NOT EXISTS, because Postgres might then read all live jobs.
WHERE (SELECT j.id FROM windrow.job j WHERE j.id = n.id AND {{org_of(j)}} = {{org_id_of(n)}}) IS NULL
    -- A job that is on its way to another shard counts as live until it has arrived there.
    AND (
        SELECT d.id
        FROM windrow.departing d
        WHERE d.id = n.id AND {{org_of(d)}} = {{org_id_of(n)}} AND d.reason IS NULL
        LIMIT 1
    ) IS NULL
