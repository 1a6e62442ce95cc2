-- Those of these jobs, by their places, that another session keeps locked: live and dead ones. It waits for nobody. The
-- others are locked for as long as this statement takes.
WITH named AS MATERIALIZED (
    SELECT n.place, n.id, (SELECT windrow.org_ids(%(orgs)s::text[]))[coalesce(n.turn, 1)] AS org_id
    FROM unnest(%(ids)s::uuid[], %(turns)s::smallint[]) WITH ORDINALITY AS n (id, turn, place)
), free AS MATERIALIZED (
    SELECT n.place
    FROM named n
    -- By id alone: see extend.sql.
    JOIN windrow.job j ON j.id = ANY (ARRAY[n.id]) AND (j.queue_id & 4294967295 = n.org_id) IS TRUE
    FOR UPDATE OF j SKIP LOCKED
), free_dead AS MATERIALIZED (
    SELECT n.place
    FROM named n
    JOIN windrow.dead d ON d.id = ANY (ARRAY[n.id]) AND (d.queue_id & 4294967295 = n.org_id) IS TRUE
    FOR UPDATE OF d SKIP LOCKED
)
SELECT n.place
FROM named n
JOIN windrow.job j ON j.id = ANY (ARRAY[n.id]) AND (j.queue_id & 4294967295 = n.org_id) IS TRUE
WHERE n.place NOT IN (SELECT free.place FROM free)
UNION ALL
SELECT n.place
FROM named n
JOIN windrow.dead d ON d.id = ANY (ARRAY[n.id]) AND (d.queue_id & 4294967295 = n.org_id) IS TRUE
WHERE n.place NOT IN (SELECT free_dead.place FROM free_dead)
