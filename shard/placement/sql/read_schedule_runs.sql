-- Returns the runs of the schedules of these slots. Each row of the result has at most 10,000 runs of one org.
SELECT part.slot, part.org, array_agg(part.run)::text AS runs
FROM (
    SELECT
        o.slot, o.org, r.run, (row_number() OVER (PARTITION BY o.org ORDER BY (r.run).schedule_id) - 1) / 10000 AS number
    FROM unnest(%(slots)s::smallint[]) AS n (slot)
    CROSS JOIN LATERAL (SELECT o.org, o.org_id, o.slot FROM windrow.org o WHERE o.slot = n.slot OFFSET 0) o
    CROSS JOIN LATERAL (SELECT s.id FROM windrow.schedule s WHERE s.org_id = o.org_id OFFSET 0) s
    CROSS JOIN LATERAL (SELECT t AS run FROM windrow.schedule_run t WHERE t.schedule_id = s.id OFFSET 0) r
) part
GROUP BY part.slot, part.org, part.number
ORDER BY part.org, part.number
