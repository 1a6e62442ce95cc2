-- Returns the figures of these orgs from the last count of jobs. Leaves out orgs that list_orgs.sql would not list.
-- Each row has the age of that count. If there are no such orgs, returns one row without an org.
SELECT
    f.org, coalesce(f.scheduled, 0) AS scheduled, coalesce(f.ready, 0) AS ready, coalesce(f.leased, 0) AS leased,
    coalesce(f.dead, 0) AS dead, (extract(epoch FROM c.at) * 1000000)::bigint - f.oldest_ready_us AS oldest_ready_age_us,
    coalesce(f.enqueued * 1000000000 / c.since_us, 0) AS enqueued_per_1000_s,
    coalesce(f.ended * 1000000000 / c.since_us, 0) AS ended_per_1000_s, c.since_us,
    (extract(epoch FROM now() - c.at) * 1000000)::bigint AS age_us
FROM (
    SELECT c.at, nullif((extract(epoch FROM c.at - c.before) * 1000000)::bigint, 0) AS since_us
    FROM windrow.org_figures_counted c
) c
LEFT JOIN (
    SELECT o.org, f.scheduled, f.ready, f.leased, f.dead, f.oldest_ready_us, f.enqueued, f.ended
    FROM windrow.org o
    JOIN windrow.owned_slot s ON s.slot = o.slot
    LEFT JOIN windrow.org_figures f ON f.org_id = o.org_id
    WHERE o.org = ANY (%(orgs)s::text[]) AND (s.state = 'owned' OR f.scheduled + f.ready + f.leased + f.dead > 0)
) f ON true
