-- Returns the schedules of all orgs in these slots, as rows in the text format of Postgres. Each row of the result has
-- at most 100 schedules of one org, so that no value becomes too large.
SELECT part.slot, part.org, array_agg(part.schedule)::text AS schedules
FROM (
    SELECT
        o.slot, o.org, s.schedule, (row_number() OVER (PARTITION BY o.org ORDER BY (s.schedule).id) - 1) / 100 AS number
    FROM unnest(%(slots)s::smallint[]) AS n (slot)
    -- For OFFSET 0, see read_queues.sql.
    CROSS JOIN LATERAL (SELECT o.org, o.org_id, o.slot FROM windrow.org o WHERE o.slot = n.slot OFFSET 0) o
    CROSS JOIN LATERAL (SELECT t AS schedule FROM windrow.schedule t WHERE t.org_id = o.org_id OFFSET 0) s
) part
GROUP BY part.slot, part.org, part.number
ORDER BY part.org, part.number
