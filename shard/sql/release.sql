-- Gives leased jobs back at once; the attempt does not count.
UPDATE windrow.job AS j
SET
    history = windrow.remember(j.history, j.attempt, j.worker, j.leased_at, now(), 'released', j.lease, NULL),
    attempt = j.attempt - 1,
    run_at = now(), visible_at = now(),
    lease = NULL, leased_at = NULL, worker = NULL
FROM (
    SELECT g.id, g.lease FROM unnest(%(ids)s::uuid[], %(leases)s::bigint[]) AS g (id, lease) ORDER BY g.id
) r
-- By id alone: see extend.sql.
WHERE j.id = ANY (ARRAY[r.id])
    AND (j.lease = r.lease AND j.visible_at > now()
        AND j.queue_id & 4294967295 = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)) IS TRUE
RETURNING j.id::text, r.lease
