-- Returns the next page of the orgs that live on this shard, with the figures of the last count. The page is sorted by
-- one figure, the largest first.
WITH here AS MATERIALIZED (
    -- MATERIALIZED makes Postgres read the slots once. Otherwise the planner, which expects few orgs, would look up the
    -- slot of each org.
    SELECT s.slot, s.state FROM windrow.owned_slot s
), counted AS (
    SELECT
        (extract(epoch FROM c.at) * 1000000)::bigint AS at_us,
        nullif((extract(epoch FROM c.at - c.before) * 1000000)::bigint, 0) AS since_us
    FROM windrow.org_figures_counted c
), listed AS (
    SELECT
        o.org, coalesce(f.scheduled, 0) AS scheduled, coalesce(f.ready, 0) AS ready, coalesce(f.leased, 0) AS leased,
        coalesce(f.dead, 0) AS dead, counted.at_us - f.oldest_ready_us AS oldest_ready_age_us,
        coalesce(f.enqueued * 1000000000 / counted.since_us, 0) AS enqueued_per_1000_s,
        coalesce(f.ended * 1000000000 / counted.since_us, 0) AS ended_per_1000_s, counted.since_us,
        CASE %(sort)s
            WHEN 'backlog' THEN coalesce(f.scheduled + f.ready, 0)
            -- -1: no job is ready.
            WHEN 'oldest' THEN coalesce(counted.at_us - f.oldest_ready_us, -1)
            WHEN 'dead' THEN coalesce(f.dead, 0)
            WHEN 'in-flight' THEN coalesce(f.leased, 0)
            WHEN 'rate' THEN coalesce(f.enqueued * 1000000000 / counted.since_us, 0)
                + coalesce(f.ended * 1000000000 / counted.since_us, 0)
            ELSE 0
        END AS figure
    FROM windrow.org o
    LEFT JOIN counted ON true
    -- Orgs that are being erased have no slot. A slot that has left this shard has the state `draining` for ever. This
    -- shard lists an org of such a slot only if it has jobs of the org. The shard to which the slot's new jobs are
    -- written lists all orgs of the slot.
    JOIN here ON here.slot = o.slot
    LEFT JOIN windrow.org_figures f ON f.org_id = o.org_id
    WHERE (here.state = 'owned' OR f.scheduled + f.ready + f.leased + f.dead > 0)
        AND (%(search)s = '' OR strpos(lower(o.org), lower(%(search)s)) > 0)
)
SELECT l.org, l.scheduled, l.ready, l.leased, l.dead, l.oldest_ready_age_us,
    l.enqueued_per_1000_s, l.ended_per_1000_s, l.since_us, l.figure
FROM listed l
WHERE l.figure < %(after_figure)s OR l.figure = %(after_figure)s AND l.org > %(after_org)s
ORDER BY l.figure DESC, l.org
LIMIT %(rows)s
