-- Returns the places of the live and dead jobs that another session keeps locked. Waits for no lock. Locks all other
-- jobs while it runs.
WITH named AS MATERIALIZED (
    SELECT n.place, n.id, {{org_id_of(n)}} AS org_id
    FROM unnest(%(ids)s::uuid[], %(org_positions)s::smallint[]) WITH ORDINALITY AS n (id, org_position, place)
), free AS MATERIALIZED (
    SELECT n.place
    FROM named n
    -- Finds the job by its id and org: see extend.sql.
    JOIN windrow.job j ON j.id = ANY (ARRAY[n.id]) AND {{org_of(j)}} = n.org_id
    FOR UPDATE OF j SKIP LOCKED
), free_dead AS MATERIALIZED (
    SELECT n.place
    FROM named n
    JOIN windrow.dead d ON d.id = ANY (ARRAY[n.id]) AND {{org_of(d)}} = n.org_id
    FOR UPDATE OF d SKIP LOCKED
)
SELECT n.place
FROM named n
JOIN windrow.job j ON j.id = ANY (ARRAY[n.id]) AND {{org_of(j)}} = n.org_id
WHERE n.place NOT IN (SELECT free.place FROM free)
UNION ALL
SELECT n.place
FROM named n
JOIN windrow.dead d ON d.id = ANY (ARRAY[n.id]) AND {{org_of(d)}} = n.org_id
WHERE n.place NOT IN (SELECT free_dead.place FROM free_dead)
