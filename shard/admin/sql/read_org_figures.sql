-- The figures of some orgs, of those that list_orgs.sql lists too, as the jobs were counted last; and the age of that
-- count for each row. One row without an org if it lists none of them.
SELECT
    f.org, coalesce(f.scheduled, 0) AS scheduled, coalesce(f.ready, 0) AS ready, coalesce(f.leased, 0) AS leased,
    coalesce(f.dead, 0) AS dead, (extract(epoch FROM c.at) * 1000000)::bigint - f.oldest_ready_us AS oldest_ready_age_us,
    (extract(epoch FROM now() - c.at) * 1000000)::bigint AS age_us
FROM windrow.org_figures_counted c
LEFT JOIN (
    SELECT o.org, f.scheduled, f.ready, f.leased, f.dead, f.oldest_ready_us
    FROM windrow.org o
    JOIN windrow.owned_slot s ON s.slot = o.slot
    LEFT JOIN windrow.org_figures f ON f.org_id = o.org_id
    WHERE o.org = ANY (%(orgs)s::text[]) AND (s.state = 'owned' OR f.org_id IS NOT NULL)
) f ON true
