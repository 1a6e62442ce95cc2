-- Gives leased jobs back at once; the attempt does not count.
UPDATE windrow.job AS j
SET
    history = windrow.remember(j.history, j.attempt, j.worker, j.leased_at, now(), 'released', j.lease, NULL),
    attempt = j.attempt - 1,
    run_at = now(), visible_at = now(),
    lease = NULL, leased_at = NULL, worker = NULL
FROM (
    SELECT g.id, g.lease, g.turn
    FROM unnest(%(ids)s::uuid[], %(leases)s::bigint[], %(turns)s::smallint[]) AS g (id, lease, turn)
    ORDER BY g.id
) r
-- By id alone: see extend.sql.
WHERE j.id = ANY (ARRAY[r.id])
    AND (j.lease = r.lease AND j.visible_at > now()
        AND j.queue_id & 4294967295 = (SELECT windrow.org_ids(%(orgs)s::text[]))[coalesce(r.turn, 1)]) IS TRUE
RETURNING j.id::text, r.lease, j.queue_id
