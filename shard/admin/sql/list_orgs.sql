-- The next page of the orgs that live here, by one of their figures, the largest first, as the jobs were counted last.
WITH here AS MATERIALIZED (
    -- MATERIALIZED fence: otherwise the planner, which expects few orgs, looks up the slot of each.
    SELECT s.slot, s.state FROM windrow.owned_slot s
), counted AS (
    SELECT (extract(epoch FROM c.at) * 1000000)::bigint AS at_us FROM windrow.org_figures_counted c
), listed AS (
    SELECT
        o.org, coalesce(f.scheduled, 0) AS scheduled, coalesce(f.ready, 0) AS ready, coalesce(f.leased, 0) AS leased,
        coalesce(f.dead, 0) AS dead, (SELECT counted.at_us FROM counted) - f.oldest_ready_us AS oldest_ready_age_us,
        CASE %(sort)s
            WHEN 'backlog' THEN coalesce(f.scheduled + f.ready, 0)
            -- -1: no job is ready.
            WHEN 'oldest' THEN coalesce((SELECT counted.at_us FROM counted) - f.oldest_ready_us, -1)
            WHEN 'dead' THEN coalesce(f.dead, 0)
            WHEN 'in-flight' THEN coalesce(f.leased, 0)
            ELSE 0
        END AS figure
    FROM windrow.org o
    -- Orgs that are being erased have no slot. Slots that have left this shard are draining for ever: of their orgs only
    -- those with jobs count. Otherwise the slot's writer lists them.
    JOIN here ON here.slot = o.slot
    LEFT JOIN windrow.org_figures f ON f.org_id = o.org_id
    WHERE (here.state = 'owned' OR f.org_id IS NOT NULL)
        AND (%(search)s = '' OR strpos(lower(o.org), lower(%(search)s)) > 0)
)
SELECT l.org, l.scheduled, l.ready, l.leased, l.dead, l.oldest_ready_age_us, l.figure
FROM listed l
WHERE l.figure < %(after_figure)s OR l.figure = %(after_figure)s AND l.org > %(after_org)s
ORDER BY l.figure DESC, l.org
LIMIT %(rows)s
