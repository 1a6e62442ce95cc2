-- Stores a workflow with its nodes, edges and jobs. If the workflow is a retry, also stores the nodes that it takes
-- over from the old workflow. Stores nothing if the shard does not own the org's slot, if a queue id is wrong, or if
-- the org has a workflow with this id. If `flow` is not NULL, adds nodes to that workflow instead; then the caller must
-- hold the lock of that workflow. Returns the time, whether the time of the workflow's id is acceptable, how many
-- queues were admitted, and whether anything was stored.
WITH clock AS (
    -- For `id_fits`, see enqueue.sql.
    SELECT
        to_timestamp(%(made_ms)s / 1e3) >= now() - %(horizon_us)s * interval '1 us'
            AND to_timestamp(%(made_ms)s / 1e3) <= now() + interval '1 hour' AS id_fits
), lane AS (
    SELECT l.queue_id
    FROM unnest(%(lane_ids)s::bigint[], %(lane_queues)s::text[]) AS l (queue_id, queue)
    CROSS JOIN LATERAL (
        SELECT q.org, q.queue, q.slot FROM windrow.queue q WHERE q.queue_id = l.queue_id OFFSET 0
    ) q
    CROSS JOIN LATERAL (SELECT s.state, s.epoch FROM windrow.owned_slot s WHERE s.slot = q.slot OFFSET 0) s
    WHERE q.org = %(org)s AND q.queue = l.queue AND s.state = 'owned' AND s.epoch <= %(epoch)s
), made AS (
    INSERT INTO windrow.workflow AS w (org_id, id, name, digest, nodes, added, open_node, retry_of)
    SELECT o.org_id, %(id)s::uuid, %(name)s, %(digest)b::bytea, %(nodes)s, %(added)s, %(open_node)s, %(retry_of)s::uuid
    FROM windrow.org o
    WHERE o.org = %(org)s AND %(flow)s::bigint IS NULL AND (SELECT clock.id_fits FROM clock)
        AND (SELECT count(*) FROM lane) = cardinality(%(lane_ids)s::bigint[])
    ON CONFLICT (org_id, id) DO NOTHING
    RETURNING w.flow
), grown AS (
    UPDATE windrow.workflow w SET added = w.added + %(added)s, open_node = %(open_node)s
    WHERE w.flow = %(flow)s::bigint AND (SELECT count(*) FROM lane) = cardinality(%(lane_ids)s::bigint[])
    RETURNING w.flow
), target AS (
    SELECT made.flow FROM made UNION ALL SELECT grown.flow FROM grown
), incoming AS (
    SELECT
        target.flow, n.node, n.name, n.id, n.callback, n.waits_on, n.added_by, n.signal IS NOT NULL AS is_signal,
        n.queue_id, n.priority, n.max_attempts,
        timestamptz 'epoch' + n.run_at_us * interval '1 us' AS run_at, n.delay_us,
        timestamptz 'epoch' + n.expires_at_us * interval '1 us' AS expires_at,
        n.waits_on IS NULL AND n.callback IS NULL AND NOT %(is_paused)s AS is_free, {{new_job_values(n)}}
    FROM target
    CROSS JOIN unnest(
        %(numbers)s::integer[], %(names)s::text[], %(ids)s::uuid[], %(callbacks)s::text[], %(waits_on)s::integer[],
        %(added_by)s::integer[], %(signals)s::integer[], %(queue_ids)s::bigint[], %(priorities)s::smallint[],
        %(max_attempts)s::smallint[],
        %(run_at_us)s::bigint[], %(delay_us)s::bigint[], %(expires_at_us)s::bigint[], {{new_job_arrays}}
    ) AS n (
        node, name, id, callback, waits_on, added_by, signal, queue_id, priority, max_attempts, run_at_us, delay_us,
        expires_at_us,
        {{job_content}}
    )
), node AS (
    INSERT INTO windrow.workflow_node (
        flow, node, name, job_id, callback, run_at, delay_us, waits_on, state, added_by, is_signal
    )
    SELECT
        i.flow, i.node, i.name, i.id, i.callback, i.run_at, i.delay_us, i.waits_on,
        CASE
            WHEN i.is_free THEN 'released'
            -- Only a pause of the workflow holds this node back. The end of the pause releases the node.
            WHEN i.waits_on IS NULL AND i.callback IS NULL THEN 'due'
            ELSE 'blocked'
        END,
        i.added_by, i.is_signal
    FROM incoming i
), ended AS (
    INSERT INTO windrow.workflow_node (flow, node, name, job_id, state, ended_at, added_by, is_signal)
    SELECT made.flow, e.node, e.name, e.job_id, e.state, now(), e.added_by, e.signal IS NOT NULL
    FROM made
    CROSS JOIN unnest(
        %(ended_nodes)s::integer[], %(ended_names)s::text[], %(ended_jobs)s::uuid[], %(ended_states)s::text[],
        %(ended_added_by)s::integer[], %(ended_signals)s::integer[]
    ) AS e (node, name, job_id, state, added_by, signal)
), edge AS (
    INSERT INTO windrow.workflow_edge (flow, node, parent, on_failed)
    SELECT target.flow, e.node, e.parent, e.on_failed
    FROM target
    CROSS JOIN unnest(%(edge_nodes)s::integer[], %(edge_parents)s::integer[], %(edge_policies)s::text[])
        AS e (node, parent, on_failed)
), stored AS (
    INSERT INTO windrow.job (
        id, queue_id, priority, max_attempts, {{job_content}}, run_at, visible_at, expires_at, workflow_node
    )
    SELECT
        i.id, i.queue_id, coalesce(i.priority, 5), i.max_attempts, {{job_content(i)}}, due.at, due.at,
        -- A job that waits for a signal expires when it is due, so that it never runs (0030_signals.sql).
        CASE WHEN i.is_signal THEN nullif(due.at, 'infinity') ELSE i.expires_at END,
        %(id)s::uuid::text || '/' || i.node
    FROM incoming i
    CROSS JOIN LATERAL (
        SELECT
            CASE
                WHEN i.is_free THEN greatest(now(), i.run_at, now() + i.delay_us * interval '1 us')
                ELSE 'infinity'
            END AS at
    ) due
    -- The rows are sorted by id, as in enqueue.sql.
    ORDER BY i.id
    RETURNING queue_id
), counted AS (
    INSERT INTO windrow.tally (org_id, accepted)
    SELECT ({{org_of(s)}})::integer, count(*) FROM stored s GROUP BY 1
)
SELECT
    now() AS now, clock.id_fits, (SELECT count(*) FROM lane) AS admitted, (SELECT count(*) FROM target) = 1 AS was_stored
FROM clock
