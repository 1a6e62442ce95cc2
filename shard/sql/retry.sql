-- Gives leased jobs back with an error, to be visible again after each one's delay.
UPDATE windrow.job AS j
SET
    history = windrow.remember(j.history, j.attempt, j.worker, j.leased_at, now(), 'nacked', j.lease, n.error),
    run_at = now() + n.delay_us * interval '1 us',
    visible_at = now() + n.delay_us * interval '1 us',
    lease = NULL, leased_at = NULL, worker = NULL
FROM (
    SELECT g.id, g.lease, g.turn, g.delay_us, g.error
    FROM unnest(%(ids)s::uuid[], %(leases)s::bigint[], %(turns)s::smallint[], %(delays_us)s::bigint[], %(errors)s::text[])
        AS g (id, lease, turn, delay_us, error)
    ORDER BY g.id
) n
-- By id alone: see extend.sql.
WHERE j.id = ANY (ARRAY[n.id])
    AND (j.lease = n.lease AND j.visible_at > now()
        AND j.queue_id & 4294967295 = (SELECT windrow.org_ids(%(orgs)s::text[]))[coalesce(n.turn, 1)]) IS TRUE
RETURNING j.id::text, n.lease, j.queue_id
