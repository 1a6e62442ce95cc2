-- For an enqueue, which knows the groups of its jobs: finds the slots that the jobs get, before the first of them is
-- inserted. Locks the groups' buckets until the end of the transaction. Returns a slot for each job, by position. NULL:
-- the job waits for a slot, is not due yet, or has no group. Returns NULL if no job has a group; `groups` is empty then.
-- The jobs of a group get its free slots in the order of their ids. They get none if an earlier job of the group waits
-- or has become due.
CREATE OR REPLACE FUNCTION windrow.take_group_slots(
    ids uuid[], queues bigint[], groups text[], run_at_us bigint[], delay_us bigint[]
) RETURNS smallint[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    slots smallint[];
    late_queues bigint[];
    late_groups text[];
BEGIN
    IF groups = '{}' THEN
        RETURN NULL;
    END IF;
    PERFORM windrow.lock_group_buckets(queues, groups);
    -- The jobs that wait need no fill at the commit: they found no free slot.
    PERFORM set_config('windrow.groups_locked', 'on', true);
    LOOP
        WITH giving AS MATERIALIZED (
            SELECT q.queue_id, q.slots_max FROM windrow.slots_of_groups(queues) q
        ), incoming AS MATERIALIZED (
            SELECT
                n.id, n.queue_id, n.group_key, n.at,
                n.group_key IS NOT NULL AND coalesce(
                    timestamptz 'epoch' + n.run_at_us * interval '1 us', now() + n.delay_us * interval '1 us', now()
                ) <= now() AS is_due
            FROM unnest(ids, queues, groups, run_at_us, delay_us) WITH ORDINALITY
                AS n (id, queue_id, group_key, run_at_us, delay_us, at)
        ), of_groups AS MATERIALIZED (
            SELECT
                n.*,
                EXISTS (
                    SELECT FROM windrow.job d
                    WHERE d.queue_id = n.queue_id AND d.group_key = n.group_key AND d.group_slot IS NULL
                        AND isfinite(d.visible_at) AND d.run_at < now()
                    OFFSET 0
                ) AS is_late,
                EXISTS (
                    SELECT FROM windrow.job w
                    WHERE w.queue_id = n.queue_id AND w.group_key = n.group_key AND w.group_slot IS NULL
                        AND NOT isfinite(w.visible_at) AND isfinite(w.run_at)
                    OFFSET 0
                ) AS is_awaited
            FROM (
                SELECT i.queue_id, i.group_key, array_agg(i.at ORDER BY i.id) AS places
                FROM incoming i
                WHERE i.is_due
                GROUP BY 1, 2
            ) n
        ), free AS (
            SELECT
                g.places,
                CASE WHEN NOT g.is_late AND NOT g.is_awaited THEN (
                    SELECT ARRAY(
                        SELECT s.slot::smallint
                        FROM generate_series(1, q.slots_max) AS s (slot)
                        WHERE s.slot <> ALL (held.slots)
                        ORDER BY s.slot
                        -- Slots above slots_max count, too: it was larger when their jobs got them.
                        LIMIT least(cardinality(g.places), greatest(0, q.slots_max - cardinality(held.slots)))
                    )
                    FROM giving q
                    CROSS JOIN LATERAL (
                        SELECT coalesce(array_agg(h.group_slot), '{}') AS slots
                        FROM windrow.job h
                        WHERE h.queue_id = g.queue_id AND h.group_key = g.group_key AND h.group_slot IS NOT NULL
                        OFFSET 0
                    ) held
                    WHERE q.queue_id = g.queue_id
                ) END AS slots
            FROM of_groups g
        )
        SELECT
            array_agg(n.slot ORDER BY n.at),
            (SELECT array_agg(g.queue_id) FROM of_groups g WHERE g.is_late),
            (SELECT array_agg(g.group_key) FROM of_groups g WHERE g.is_late)
        INTO slots, late_queues, late_groups
        FROM (
            SELECT p.at, f.slots[p.turn] AS slot
            FROM free f
            CROSS JOIN unnest(f.places) WITH ORDINALITY AS p (at, turn)
            UNION ALL
            SELECT i.at, NULL FROM incoming i WHERE NOT i.is_due
        ) n;
        -- Jobs that have become due come first. If none of them gets a slot, the new jobs wait, too: another session may
        -- have locked those jobs.
        EXIT WHEN late_queues IS NULL OR windrow.fill_group_slots(late_queues, late_groups) = 0;
    END LOOP;
    RETURN slots;
END
$$;
