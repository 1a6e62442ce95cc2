-- Ends leases with this outcome. Each job becomes visible again after its delay, or at once if there are no delays. A
-- job that is not due at once keeps its group slot only if its group has a single slot. Such a group must keep the
-- order of its jobs. For other groups, only the number of leases is limited.
UPDATE windrow.job AS j
SET
    history = windrow.remember(
        j.history, j.attempt, j.worker, j.leased_at, now(), %(outcome)s::text, j.lease, n.failure::jsonb,
        coalesce(n.log, j.log)
    ),
    attempt = j.attempt - CASE WHEN %(counts)s::boolean THEN 0 ELSE 1 END,
    run_at = now() + coalesce(n.delay_us, 0) * interval '1 us',
    visible_at = now() + coalesce(n.delay_us, 0) * interval '1 us',
    group_slot = CASE
        WHEN j.group_slot IS NULL OR coalesce(n.delay_us, 0) = 0 THEN j.group_slot
        WHEN (SELECT q.group_concurrency > 1 FROM windrow.queue q WHERE q.queue_id = j.queue_id) THEN NULL
        ELSE j.group_slot
    END,
    lease = NULL, leased_at = NULL, worker = NULL, log = NULL
FROM (
    SELECT g.id, g.lease, g.org_position, g.delay_us, g.failure, g.log
    FROM unnest(
        %(ids)s::uuid[], %(leases)s::bigint[], %(org_positions)s::smallint[], %(delays_us)s::bigint[],
        %(failures)s::text[], %(logs)s::text[]
    ) AS g (id, lease, org_position, delay_us, failure, log)
    ORDER BY g.id
) n
-- Finds the job by its id and org: see extend.sql.
WHERE j.id = ANY (ARRAY[n.id]) AND {{org_of(j)}} = {{org_id_of(n)}}
    AND (j.lease = n.lease AND j.visible_at > now()) IS TRUE
RETURNING j.id::text, n.lease, j.queue_id
